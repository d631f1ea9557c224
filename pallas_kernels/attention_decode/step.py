"""How a program of `split_kernel` begins a step: its queries turned, the new token in the cache.

    slots of a row   | 0 ...        | ...          | ... high     |        high: the new token's
    its programs     | split 0      | split 1      | split 2      |
                       turn their queries            ... and write, then read, slot `high`

Every program turns the queries that it reads. One a row and kv head, whose split holds the slot,
turns the key as well and writes key and value; a barrier among its threads later it reads them like
the others. No other program reads or writes the slot, so programs need no order among themselves. A
kv head whose groups are all off gets its entry too.

All loads come first, of the key and its angles in every program: which of them holds the slot is
known only when `high` is there, and one wait after another is what the kernel's time is made of.
"""

import triton.language as tl

from pallas_kernels._common.jit import jit
from pallas_kernels.rope_cache.triton import normed


@jit
def begin_step(
    k_entry,  # [D] of the cache: the new token's, of this kv head
    v_entry,  # [D], likewise
    holds,  # whether this program writes it
    queries,  # [HEADS, BLOCK_D], not turned
    q,  # [HEADS, 1], where their heads begin
    new_k,  # [D]
    new_v,  # [D]
    cos,  # [D / 2] float32
    sin,  # [D / 2] float32
    q_norm,  # [D], read if HAS_NORM
    k_norm,  # [D], read if HAS_NORM
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """The queries normed and turned; the key, too, and with its value in the cache if `holds`."""
    DTYPE: tl.constexpr = queries.dtype
    columns = tl.arange(0, BLOCK_D)
    ok = columns < D
    pair = (columns + D // 2) % D  # the column that a column is turned with
    angle = columns % (D // 2)
    # Whole tiles of what all heads share: a row of it would have to be handed from thread to
    # thread through shared memory, behind barriers.
    tile = tl.broadcast_to(columns[None, :], (HEADS, BLOCK_D))
    tile_pair = tl.broadcast_to(pair[None, :], (HEADS, BLOCK_D))
    tile_angle = tl.broadcast_to(angle[None, :], (HEADS, BLOCK_D))
    tile_ok = tile < D
    queries_pair = tl.load(q + tile_pair, mask=tile_ok, other=0.0)
    c = tl.load(cos + tile_angle, mask=tile_ok, other=0.0)
    s = tl.load(sin + tile_angle, mask=tile_ok, other=0.0)
    key = tl.load(new_k + columns, mask=ok, other=0.0)
    key_pair = tl.load(new_k + pair, mask=ok, other=0.0)
    value = tl.load(new_v + columns, mask=ok, other=0.0)
    key_c = tl.load(cos + angle, mask=ok, other=0.0)
    key_s = tl.load(sin + angle, mask=ok, other=0.0)
    weight = tl.load(q_norm + tile, mask=tile_ok, other=0.0) if HAS_NORM else 0.0
    weight_pair = tl.load(q_norm + tile_pair, mask=tile_ok, other=0.0) if HAS_NORM else 0.0
    key_weight = tl.load(k_norm + columns, mask=ok, other=0.0) if HAS_NORM else 0.0
    key_weight_pair = tl.load(k_norm + pair, mask=ok, other=0.0) if HAS_NORM else 0.0
    tl.debug_barrier()  # the compiler moves no load across: the key's are not to wait for `holds`
    if HAS_NORM:
        scale = _norm_scale(queries, D, EPS)[:, None]
        queries = normed(queries, scale, weight, DTYPE)
        queries_pair = normed(queries_pair, scale, weight_pair, DTYPE)
    queries = _turned(queries, queries_pair, c, tl.where(tile < D // 2, -s, s), DTYPE)
    if holds:
        if HAS_NORM:
            key_scale = _norm_scale(key[None, :], D, EPS)
            key = normed(key, key_scale, key_weight, DTYPE)
            key_pair = normed(key_pair, key_scale, key_weight_pair, DTYPE)
        key_s = tl.where(columns < D // 2, -key_s, key_s)
        tl.store(k_entry + columns, _turned(key, key_pair, key_c, key_s, DTYPE), mask=ok)
        tl.store(v_entry + columns, value, mask=ok)
        tl.debug_barrier()  # other threads of the program will read them
    return queries


@jit
def _norm_scale(heads, D: tl.constexpr, EPS: tl.constexpr):
    """1 / RMS of every head."""
    values = heads.to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1) / D + EPS)


@jit
def _turned(x, pair, c, s, DTYPE: tl.constexpr):
    """`x` turned, each column with its pair's other; `s` is -sin in the first halves of heads."""
    return (x.to(tl.float32) * c + pair.to(tl.float32) * s).to(DTYPE)
