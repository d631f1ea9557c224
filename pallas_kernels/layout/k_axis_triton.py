"""`KOrder` in two Triton kernels: count patterns by blocks of tokens, then plan and place.

program id -> (block of BLOCK_M tokens, super-group)
partial[super-group, block, pattern] = tokens of that pattern in the block
place: every program sums the counts, makes its super-group's whole plan (a few hundred numbers,
       cheaper than a third kernel), and sends its own tokens through it
"""

import math

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Bool, Int32

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.jit import jit
from pallas_kernels.layout.k_axis import FULL, TILE, KOrder, tile_bound

BLOCK_M = 256
CHUNK = 64  # tokens compared, or block counts summed, at a time
WARPS = 8


@jit
def bits_of(count, first_group, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The bit of each of the super-group's groups in a node: 0 for the busiest. 8 or more: none."""
    one = tl.arange(0, 8)
    group = first_group + one
    inside = (one < SIZE) & (group < GROUPS)
    own = tl.load(count + group, mask=inside, other=-1)
    # The same numbers along the other axis: loaded again rather than moved between threads.
    theirs = tl.load(count + group[None, :], mask=inside[None, :], other=-1)
    first = (theirs > own[:, None]) | ((theirs == own[:, None]) & (one[None, :] < one[:, None]))
    return tl.sum(first.to(tl.int32), axis=1)


@jit
def patterns_of(mask, tokens, M, bits, first_group, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """`1 << bits[group]` for the groups that are on, for some tokens; 0 past the end."""
    one = tl.arange(0, 8)
    group = first_group + one
    on = tl.load(
        mask + tokens.to(tl.int64)[:, None] * GROUPS + group[None, :],
        mask=(tokens < M)[:, None] & ((one < SIZE) & (group < GROUPS))[None, :],
        other=0,
    )
    return tl.sum(on.to(tl.int32) << bits[None, :], axis=1)


@jit
def k_count_kernel(
    mask,
    count,
    M,
    blocks,
    partial,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PATTERNS: tl.constexpr,  # 2 ** SIZE
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tokens of every pattern in a block: `partial[super-group, blocks, PATTERNS]`."""
    SUPERS: tl.constexpr = (GROUPS + SIZE - 1) // SIZE
    pid = tl.program_id(0)
    block = pid // SUPERS
    super_group = pid % SUPERS
    bins = tl.arange(0, PATTERNS)
    first_group = super_group * SIZE
    bits = bits_of(count, first_group, GROUPS, SIZE)
    tokens = block * BLOCK_M + tl.arange(0, BLOCK_M)
    pattern = patterns_of(mask, tokens, M, bits, first_group, GROUPS, SIZE)
    pattern = tl.where(tokens < M, pattern, PATTERNS)
    total = tl.zeros((PATTERNS,), tl.int32)
    for start in range(0, BLOCK_M, CHUNK):
        some = tl.gather(pattern, start + tl.arange(0, CHUNK), 0)
        total += tl.sum((bins[:, None] == some[None, :]).to(tl.int32), axis=1)
    tl.store(partial + (super_group * blocks + block) * PATTERNS + bins, total)


@jit
def k_place_kernel(
    mask,
    count,
    partial,
    M,
    blocks,
    tiles,
    rows_out,
    tiles_out,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PATTERNS: tl.constexpr,  # 2 ** SIZE
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Every token's row, and what every tile computes, from the blocks' counts."""
    SUPERS: tl.constexpr = (GROUPS + SIZE - 1) // SIZE
    pid = tl.program_id(0)
    block = pid // SUPERS
    super_group = pid % SUPERS
    bins = tl.arange(0, PATTERNS)

    # Tokens of every pattern: before this block, and in all.
    total = tl.zeros((PATTERNS,), tl.int32)
    before = tl.zeros((PATTERNS,), tl.int32)
    for start in range(0, blocks, CHUNK):
        some = start + tl.arange(0, CHUNK)
        counts = tl.load(
            partial + (super_group * blocks + some)[:, None] * PATTERNS + bins[None, :],
            mask=(some < blocks)[:, None],
            other=0,
        )
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((some < block)[:, None], counts, 0), axis=0)

    # The plan: `make_plan` of the specification.
    passed_to = tl.zeros((PATTERNS,), tl.int32)
    for bit in tl.static_range(SIZE):
        ending = bins & ((2 << bit) - 1)
        node = ending == (1 << bit) - 1
        parent = ending == (2 << bit) - 1
        rest = total % TILE
        left_over = tl.where(node & (rest < FULL), rest, 0)
        at_parent = tl.gather(total, tl.minimum(bins + (1 << bit), PATTERNS - 1), 0)
        passed_to = tl.where(node, at_parent, passed_to)
        received = tl.gather(left_over, tl.maximum(bins - (1 << bit), 0), 0)
        total += tl.where(parent, received, 0)
    rest = total % TILE
    keep = tl.where((rest < FULL) & (bins != PATTERNS - 1), total - rest, total)
    own_tiles = (keep + TILE - 1) // TILE
    used = tl.sum(own_tiles, axis=0)
    base = (used - tl.cumsum(own_tiles, axis=0)) * TILE

    # Where this block's tokens go: `follow` of the specification.
    lanes = tl.arange(0, BLOCK_M)
    tokens = block * BLOCK_M + lanes
    first_group = super_group * SIZE
    bits = bits_of(count, first_group, GROUPS, SIZE)
    pattern = patterns_of(mask, tokens, M, bits, first_group, GROUPS, SIZE)
    rank = tl.gather(before, pattern, 0)
    for start in range(0, BLOCK_M, CHUNK):
        others = start + tl.arange(0, CHUNK)
        theirs = tl.gather(pattern, others, 0)
        earlier = (pattern[:, None] == theirs[None, :]) & (others[None, :] < lanes[:, None])
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    node = pattern
    for bit in tl.static_range(SIZE):
        stays = tl.gather(keep, node, 0)
        moved = rank - stays + tl.gather(passed_to, node, 0)
        moves = ((node & ((2 << bit) - 1)) == (1 << bit) - 1) & (rank >= stays)
        rank = tl.where(moves, moved, rank)
        node = tl.where(moves, node | (1 << bit), node)
    slot = tl.gather(base, node, 0) + rank
    ok = tokens < M
    super_rows = rows_out + super_group.to(tl.int64) * tiles * TILE
    one = tl.arange(0, 8)
    own = patterns_of(mask, tokens, M, one, first_group, GROUPS, SIZE)
    tl.store(super_rows + slot, tokens | (own << 24), mask=ok)

    # The first row of a tile describes it.
    listed = tl.zeros((BLOCK_M,), tl.int32)
    length = tl.zeros((BLOCK_M,), tl.int32)
    exists = GROUPS - first_group  # groups past the end have the highest bits
    for bit in tl.static_range(SIZE):
        on = tl.where(bit < exists, (node >> bit) & 1, 0)
        group = tl.sum(tl.where(bits == bit, one, 0), axis=0)
        listed |= on * (group << (4 * length))
        length += on
    own_rows = tl.minimum(tl.gather(keep, node, 0) - rank, TILE)
    first = ok & (slot % TILE == 0)
    described = tiles_out + (super_group * tiles + slot // TILE) * 2
    tl.store(described, listed, mask=first)
    tl.store(described + 1, length | (own_rows << 8), mask=first)
    if block == 0:
        for start in range(used, tiles, CHUNK):
            tile = start + tl.arange(0, CHUNK)
            unused = tiles_out + (super_group * tiles + tile) * 2
            tl.store(unused, tl.zeros((CHUNK,), tl.int32), mask=tile < tiles)
            tl.store(unused + 1, tl.zeros((CHUNK,), tl.int32), mask=tile < tiles)


def make_k_order(
    mask: Bool[Array, "M groups"], count: Int32[Array, " groups"], size: int
) -> KOrder:
    """See `k_axis.make_k_order`. Rows past a tile's own hold whatever was there."""
    triton_support.require_device("mask_layout", current_device().capability)
    tokens, groups = mask.shape
    blocks, supers, tiles = (
        math.ceil(tokens / BLOCK_M),
        math.ceil(groups / size),
        tile_bound(tokens),
    )
    constants = dict(GROUPS=groups, SIZE=size, PATTERNS=1 << size, BLOCK_M=BLOCK_M, CHUNK=CHUNK)
    (partial,) = triton_support.launch(
        k_count_kernel,
        [mask, count],
        [tokens, blocks],
        [jax.ShapeDtypeStruct((supers, blocks, 1 << size), jnp.int32)],
        grid=blocks * supers,
        constants=constants,
        num_warps=WARPS,
        num_stages=1,
    )
    rows, described = triton_support.launch(
        k_place_kernel,
        [mask, count, partial],
        [tokens, blocks, tiles],
        [
            jax.ShapeDtypeStruct((supers, tiles * TILE), jnp.int32),
            jax.ShapeDtypeStruct((supers, tiles, 2), jnp.int32),
        ],
        grid=blocks * supers,
        constants=dict(constants, TILE=TILE, FULL=FULL),
        num_warps=WARPS,
        num_stages=1,
    )
    return KOrder(rows, described, size)
