"""The form for few tokens where a layer has fewer tiles than multiprocessors: K is split.

A query projection of 4,096 channels has 32 tiles of 128. `SPLITS` programs share a tile, each with
its part of K, and leave float32 sums; `sum_kernel` adds them in order, so the result is always the
same, and finishes (SwiGLU, bias, zeros).

    program id -> (split, group, tile in group);   K part of split s: s * PART .. (s + 1) * PART - 1
"""

import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def split_k_kernel(
    x,  # [M, K]
    w,  # [N, K]
    w_up,  # [N, K], read if GLU
    mask,  # [M, GROUPS] bool
    M,
    sums,  # [SPLITS, 1 or 2 if GLU, M, N] float32, written where the mask is on
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    GLU: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,  # M rounded up to 16, 32, 64
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One part of K of one tile, if any token needs its group."""
    TILES_G: tl.constexpr = (G + BLOCK_N - 1) // BLOCK_N
    PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    pid = tl.program_id(0)
    split = pid // (GROUPS * TILES_G)
    tile = pid % (GROUPS * TILES_G)
    group = tile // TILES_G
    columns = group * G + (tile % TILES_G) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = columns < tl.minimum(group * G + G, N)
    channel = tl.minimum(columns, N - 1).to(tl.int64)
    tokens = tl.arange(0, TOKENS)
    token_ok = tokens < M
    on = tl.load(mask + tokens * GROUPS + group, mask=token_ok, other=0).to(tl.int32)
    if tl.max(on, axis=0) != 0:
        first = split * PART
        k = first + tl.arange(0, BLOCK_K)
        row = tl.where(on != 0, tokens, 0).to(tl.int64)
        x_tile = x + row[None, :] * K + k[:, None]
        w_tile = w + channel[:, None] * K + k[None, :]
        w_up_tile = w_up + channel[:, None] * K + k[None, :]
        acc = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        acc_up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        for start in range(0, PART, BLOCK_K):
            ok = start + k < K
            if K % (SPLITS * BLOCK_K) == 0:
                a = tl.load(w_tile)
                b = tl.load(x_tile)
            else:
                a = tl.load(w_tile, mask=ok[None, :], other=0.0)
                b = tl.load(x_tile, mask=ok[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if GLU:
                if K % (SPLITS * BLOCK_K) == 0:
                    c = tl.load(w_up_tile)
                else:
                    c = tl.load(w_up_tile, mask=ok[None, :], other=0.0)
                acc_up = tl.dot(c, b, acc_up, input_precision=PRECISION)
            x_tile += BLOCK_K
            w_tile += BLOCK_K
            w_up_tile += BLOCK_K
        at = sums + split.to(tl.int64) * (2 * M * N if GLU else M * N)
        at += tokens.to(tl.int64)[None, :] * N + columns[:, None]
        within = (token_ok & (on != 0))[None, :] & column_ok[:, None]
        tl.store(at, acc, mask=within)
        if GLU:
            tl.store(at + M * N, acc_up, mask=within)


@jit
def sum_kernel(
    sums,  # [SPLITS, 1 or 2 if GLU, M, N] float32, read where the mask is on
    bias,  # [N], read if HAS_BIAS
    mask,  # [M, GROUPS] bool
    M,
    out,  # [M, N]
    N: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    GLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`BLOCK` outputs: their sums in order, SwiGLU or bias, zeros where the mask is off."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = M.to(tl.int64) * N
    column = at % N
    on = tl.load(mask + at // N * GROUPS + column // G, mask=at < size, other=0).to(tl.int32) != 0
    result = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = sums + split * (2 * size if GLU else size) + at
        result += tl.load(part, mask=on, other=0.0)
        if GLU:
            up += tl.load(part + size, mask=on, other=0.0)
    if GLU:
        result = result / (1.0 + tl.exp(-result)) * up
    if HAS_BIAS:
        added = tl.load(bias + column, mask=on, other=0.0).to(tl.float32)
        result = tl.where(on, result + added, 0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=at < size)
