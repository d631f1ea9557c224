"""How a program of `split_kernel` begins a step: the new token in the cache, its queries turned.

    slots of a row   | 0 ...        | ...          | ... high     |        high: the new token's
    its programs     | split 0      | split 1      | split 2      |
                       turn their queries            ... and write, then read, slot `high`

One program a row and kv head, whose split holds the slot, turns the key and writes key and value; a
barrier among its threads later it reads them like the others. No other program reads or writes the
slot, so programs need no order among themselves. A kv head whose groups are all off gets its entry
too. Every program that reads slots turns the queries that it needs.

All loads come first, of the key and its angles in every program: which of them holds the slot is
known only when `high` is there, and one wait after another is what the kernel's time is made of.

Tiles of heads are `[ROWS, 2, HALF]`, a head's halves apart, so that a column and the one it is
turned with are loaded alike, 16 bytes at a time. ROWS are the kv head's own query heads, not the 16
rows that the tensor cores take: those are made of them at the end.
"""

import triton.language as tl

from pallas_kernels._common.jit import jit
from pallas_kernels._common.rms import rms_normed, rms_scale


@jit
def ask_queries(
    q,  # [PER_KV, D]
    cos,  # [D / 2] float32
    sin,  # [D / 2] float32
    q_norm,  # [D], read if HAS_NORM
    D: tl.constexpr,
    PER_KV: tl.constexpr,
    ROWS: tl.constexpr,  # PER_KV rounded up to a power of two
    HALF: tl.constexpr,  # D / 2 likewise
    HAS_NORM: tl.constexpr,
):
    """What `turned_queries` takes: heads, what each column is turned with, angles, norm weights."""
    head = tl.minimum(tl.arange(0, ROWS), PER_KV - 1)[:, None, None]
    half = tl.arange(0, 2)[None, :, None]
    i = tl.arange(0, HALF)[None, None, :]
    # Whole tiles of what all heads share: a row of it would have to be handed from thread to
    # thread through shared memory, behind barriers.
    angle = tl.broadcast_to(i, (ROWS, 2, HALF))
    column = tl.broadcast_to(half * (D // 2) + i, (ROWS, 2, HALF))
    pair = tl.broadcast_to((1 - half) * (D // 2) + i, (ROWS, 2, HALF))
    ok = angle < D // 2
    heads = tl.load(q + head * D + column, mask=ok, other=0.0)
    pairs = tl.load(q + head * D + pair, mask=ok, other=0.0)
    c = tl.load(cos + angle, mask=ok, other=0.0)
    s = tl.load(sin + angle, mask=ok, other=0.0)
    weight = tl.load(q_norm + column, mask=ok, other=0.0) if HAS_NORM else 0.0
    weight_pair = tl.load(q_norm + pair, mask=ok, other=0.0) if HAS_NORM else 0.0
    return heads, pairs, c, s, weight, weight_pair


@jit
def turned_queries(
    asked,  # of `ask_queries`
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """`[HEADS, 2 HALF]`, normed and turned: the heads again and again."""
    heads, pairs, c, s, weight, weight_pair = asked
    DTYPE: tl.constexpr = heads.dtype
    if HAS_NORM:
        values = heads.to(tl.float32)
        scale = rms_scale(tl.sum(tl.sum(values * values, axis=2), axis=1), D, EPS)
        heads = rms_normed(heads, scale[:, None, None], weight, DTYPE)
        pairs = rms_normed(pairs, scale[:, None, None], weight_pair, DTYPE)
    half = tl.arange(0, 2)[None, :, None]
    heads = _turned(heads, pairs, c, tl.where(half == 0, -s, s), DTYPE)
    again = tl.broadcast_to(tl.reshape(heads, (1, ROWS, 2 * HALF)), (HEADS // ROWS, ROWS, 2 * HALF))
    return tl.reshape(again, (HEADS, 2 * HALF))


@jit
def ask_entry(
    new_k,  # [D]
    new_v,  # [D]
    cos,  # [D / 2] float32
    sin,  # [D / 2] float32
    k_norm,  # [D], read if HAS_NORM
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """What `write_entry` takes."""
    columns = tl.arange(0, BLOCK_D)
    ok = columns < D
    pair = (columns + D // 2) % D  # the column that a column is turned with
    angle = columns % (D // 2)
    key = tl.load(new_k + columns, mask=ok, other=0.0)
    key_pair = tl.load(new_k + pair, mask=ok, other=0.0)
    value = tl.load(new_v + columns, mask=ok, other=0.0)
    c = tl.load(cos + angle, mask=ok, other=0.0)
    s = tl.load(sin + angle, mask=ok, other=0.0)
    weight = tl.load(k_norm + columns, mask=ok, other=0.0) if HAS_NORM else 0.0
    weight_pair = tl.load(k_norm + pair, mask=ok, other=0.0) if HAS_NORM else 0.0
    return key, key_pair, value, c, s, weight, weight_pair


@jit
def write_entry(
    k_entry,  # [D] of the cache: the new token's, of this kv head
    v_entry,  # [D], likewise
    asked,  # of `ask_entry`
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """The key, normed and turned, and the value in the cache; the program's threads see them."""
    key, key_pair, value, c, s, weight, weight_pair = asked
    DTYPE: tl.constexpr = key.dtype
    columns = tl.arange(0, BLOCK_D)
    ok = columns < D
    if HAS_NORM:
        values = key.to(tl.float32)
        scale = rms_scale(tl.sum(values * values, axis=0), D, EPS)
        key = rms_normed(key, scale, weight, DTYPE)
        key_pair = rms_normed(key_pair, scale, weight_pair, DTYPE)
    s = tl.where(columns < D // 2, -s, s)
    tl.store(k_entry + columns, _turned(key, key_pair, c, s, DTYPE), mask=ok)
    tl.store(v_entry + columns, value, mask=ok)
    tl.debug_barrier()  # other threads of the program will read them


@jit
def _turned(x, pair, c, s, DTYPE: tl.constexpr):
    """`x` turned, each column with its pair's other; `s` is -sin in the first halves of heads."""
    return (x.to(tl.float32) * c + pair.to(tl.float32) * s).to(DTYPE)
