"""`KOrder`: the token order that input-pruned products need, and its specification.

`size` neighbouring groups are one *super-group*; a token's on/off bits there are its *pattern*.
Tokens with the same pattern share tiles of TILE rows, so a tile has to multiply the groups of its
pattern only and every token's sum over the super-group stays in registers.

    size = 2, TILE = 4 (drawn; 128 in truth), 9 tokens           tiles in launch order
    tokens of pattern 11: 5 8       10: 0 2 3 6    01: 1 4 7    00: -
      node 01 has 3 of 4 rows: enough (>= FULL), a tile of its own, one row of padding
      node 10 has 4: a tile                                      11: 5 8 . .   groups 0 1
      node 11 has 2 and no parent: a tile all the same           10: 0 2 3 6   group 1
                                                                 01: 1 4 7 .   group 0

A node with fewer than FULL rows left over passes them on to its parent, the pattern with its lowest
absent bit added: those rows then ride in tiles that compute one group more than they need. That
keeps tiles full, and with half a tile of tokens a pattern it pairs exactly the patterns that differ
in the lowest bit. The parent's lowest absent bit is higher, so one pass over the bits visits every
node after its children. Bits go to groups by how many tokens they have, the busiest lowest: it is
the cheapest to add, as most tokens need it anyway.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

TILE = 128  # rows of a tile
FULL = 96  # rows that are enough for a tile of their own
LARGEST = 8  # groups of a super-group: a pattern fits the top byte of a row's entry
TOKENS = 1 << 24  # and the token the other three


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KOrder:
    """Tiles of tokens for every super-group. Made by `mask_layout(..., k_axis=True)`.

    Attributes:
        rows: `[super-groups, tiles * TILE]` int32: token + (its pattern << 24), row after row of
            tile after tile. Rows past a tile's own are not written.
        tiles: `[super-groups, tiles, 2]` int32: the tile's groups within the super-group, 4 bits
            each from the lowest bits; and (number of groups) + (number of rows << 8). Tiles that
            are not needed have 0 rows, and come last.
        size: groups of a super-group (static); the last super-group may have fewer.
    """

    rows: Int32[Array, "supers slots"]
    tiles: Int32[Array, "supers tiles 2"]
    size: int = dataclasses.field(metadata=dict(static=True))


class Plan(NamedTuple):
    """What happens to the tokens that a pattern node collects: `[supers, patterns]` each.

    Its first `keep` tokens take rows `base`, `base + 1`, ...; token `keep + j` becomes token
    `passed_to + j` of the parent.
    """

    keep: Int32[Array, "supers patterns"]
    base: Int32[Array, "supers patterns"]
    passed_to: Int32[Array, "supers patterns"]


def super_group_size(tokens: int, groups: int) -> int:
    """Groups of a super-group: all of up to 8, else as many as leave a tile of tokens a pattern.

    More groups mean fewer partial sums, but with fewer than TILE random tokens a pattern a tile
    has to compute more groups than its tokens need. Many groups are narrow groups, whose tiles
    have short loops: there half a tile of tokens a pattern is better (measured, docs).
    """
    if groups <= LARGEST:
        return groups
    wanted = TILE / 2 if groups > 64 else TILE
    most = min(max(round(math.log2(max(tokens, 1) / wanted)), 4), LARGEST)
    supers = math.ceil(groups / most)
    return math.ceil(groups / supers)


def tile_bound(tokens: int) -> int:
    """The most tiles a super-group can have: all but the last hold at least FULL tokens."""
    return tokens // FULL + 1


def make_k_order(
    mask: Bool[Array, "M groups"], count: Int32[Array, " groups"], size: int
) -> KOrder:
    """The specification, in jnp. Stable: tokens of a pattern keep their order."""
    tokens, groups = mask.shape
    supers, patterns, tiles = math.ceil(groups / size), 1 << size, tile_bound(tokens)
    padding = supers * size - groups
    bits = jnp.pad(mask, ((0, 0), (0, padding))).reshape(tokens, supers, size)
    own = jnp.sum(bits << jnp.arange(size), axis=2, dtype=jnp.int32).T  # [supers, M]
    # The bit of a group in a node: the busiest group's is the lowest.
    counts = jnp.pad(count, (0, padding), constant_values=-1).reshape(supers, size)
    by_count = jnp.argsort(-counts, axis=1, stable=True)  # [supers, bit] -> group
    bit_of = jnp.argsort(by_count, axis=1)  # [supers, group] -> bit
    pattern = jnp.sum(bits << bit_of, axis=2, dtype=jnp.int32).T
    order = jnp.argsort(pattern, axis=1, stable=True)
    ordered = jnp.take_along_axis(pattern, order, axis=1)
    start = jax.vmap(lambda p: jnp.searchsorted(p, jnp.arange(patterns)))(ordered)
    counts = jax.vmap(lambda p: jnp.searchsorted(p, jnp.arange(patterns), side="right"))(ordered)
    plan = make_plan((counts - start).astype(jnp.int32), size)
    rank = jnp.arange(tokens) - jnp.take_along_axis(start, ordered, axis=1)
    node, rank = follow(plan, ordered, rank.astype(jnp.int32), size)
    slot = jnp.take_along_axis(plan.base, node, axis=1) + rank
    own_rows = jnp.minimum(jnp.take_along_axis(plan.keep, node, axis=1) - rank, TILE)
    super_index = jnp.arange(supers)[:, None]
    rows = jnp.zeros((supers, tiles * TILE), jnp.int32)
    own = jnp.take_along_axis(own, order, axis=1)
    rows = rows.at[super_index, slot].set(order.astype(jnp.int32) | own << 24)
    exists = groups - jnp.arange(supers)[:, None] * size  # of each super-group, `size` or fewer
    listed, length = group_list(node, by_count.astype(jnp.int32), exists)
    described = jnp.stack([listed, length | own_rows << 8], axis=-1)
    tile = jnp.where(slot % TILE == 0, slot // TILE, tiles)  # others are dropped
    found = jnp.zeros((supers, tiles, 2), jnp.int32)
    found = found.at[super_index, tile].set(described, mode="drop")
    return KOrder(rows, found, size)


def make_plan(counts: Int32[Array, "supers patterns"], size: int) -> Plan:
    """From the tokens of every pattern to rows, and what is passed on to parents."""
    total = counts
    passed_to = jnp.zeros_like(counts)
    for bit in range(size):
        # Nodes whose lowest absent group is `bit` end in 0111..., their parents in 1111...
        node = slice((1 << bit) - 1, None, 2 << bit)
        parent = slice((2 << bit) - 1, None, 2 << bit)
        passed_to = passed_to.at[:, node].set(total[:, parent])
        left_over = total[:, node] - kept(total[:, node])
        total = total.at[:, parent].add(left_over)
    keep = kept(total).at[:, -1].set(total[:, -1])  # the last has no parent
    tiles = -(-keep // TILE)
    base = (jnp.sum(tiles, axis=1, keepdims=True) - jnp.cumsum(tiles, axis=1)) * TILE
    return Plan(keep, base.astype(jnp.int32), passed_to)


def kept(total: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """How many of a node's tokens get tiles of its own."""
    return jnp.where(total % TILE >= FULL, total, total - total % TILE)


def follow(
    plan: Plan, node: Int32[Array, "supers M"], rank: Int32[Array, "supers M"], size: int
) -> tuple[Int32[Array, "supers M"], Int32[Array, "supers M"]]:
    """Where tokens end: node and rank there, from their own pattern and their rank in it."""
    for bit in range(size):
        keep = jnp.take_along_axis(plan.keep, node, axis=1)
        passed_to = jnp.take_along_axis(plan.passed_to, node, axis=1)
        moves = (node & ((2 << bit) - 1) == (1 << bit) - 1) & (rank >= keep)
        rank = jnp.where(moves, rank - keep + passed_to, rank)
        node = jnp.where(moves, node | 1 << bit, node)
    return node, rank


def group_list(
    node: Int32[Array, "supers M"],
    by_count: Int32[Array, "supers bits"],
    exists: Int32[Array, "supers 1"],
) -> tuple[Int32[Array, "supers M"], Int32[Array, "supers M"]]:
    """The groups of a node's bits, 4 bits each from the lowest bits; and how many they are.

    The last super-group may have fewer groups than bits: its `exists` lowest bits are groups.
    """
    listed = jnp.zeros_like(node)
    length = jnp.zeros_like(node)
    for bit in range(by_count.shape[1]):
        on = jnp.where(bit < exists, node >> bit & 1, 0)
        listed = listed | on * (by_count[:, bit, None] << 4 * length)
        length = length + on
    return listed, length
