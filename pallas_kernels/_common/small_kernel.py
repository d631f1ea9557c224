"""The form for few tokens (1..64) of the output-pruned GEMMs: bound by the bytes of the weights.

One program reads `BLOCK_N` channels of one group, once, if any token needs the group:

    program id -> (group, tile in group);   needed = any(mask[:, group])
    one token:     sum over k of w[BLOCK_N, k] * x[k]     on the ordinary units, from registers
    more tokens:   w[BLOCK_N, k] . x[tokens, k]^T         on the tensor cores, weights as the
                                                          long operand
A token whose group is off gets zeros in the same store; its column of the product is discarded.
"""

import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def small_kernel(
    x,  # [M, K]
    w,  # [N, K]
    w_up,  # [N, K], read if GLU
    bias,  # [N], read if HAS_BIAS
    mask,  # [M, GROUPS] bool
    M,
    out,  # [M, N]
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    GLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,  # 1, or M rounded up to 16, 32, 64
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_N channels of one group, for all tokens."""
    TILES_G: tl.constexpr = (G + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    group = pid // TILES_G
    first = group * G + (pid % TILES_G) * BLOCK_N
    end = tl.minimum(group * G + G, N)
    if TOKENS == 1:
        on = tl.load(mask + group).to(tl.int32)
    else:
        tokens = tl.arange(0, TOKENS)
        on = tl.load(mask + tokens * GROUPS + group, mask=tokens < M, other=0).to(tl.int32)
    small_tile(
        x, w, w_up, bias, on, first, end, M, out, N, K, GLU, HAS_BIAS, PRECISION, TOKENS, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip


@jit
def small_tile(
    x,  # [M, K]
    w,  # [N, K]
    w_up,  # [N, K], read if GLU
    bias,  # [N], read if HAS_BIAS
    on,  # which tokens the channels run for: a number for one token, else [TOKENS]
    first_column,
    end_column,
    M,
    out,  # [M, N]
    N,
    K: tl.constexpr,
    GLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N channels from `first_column` on, below `end_column`, for all tokens."""
    columns = first_column + tl.arange(0, BLOCK_N)
    column_ok = columns < end_column
    channel = tl.minimum(columns, N - 1).to(tl.int64)
    WHOLE: tl.constexpr = K % BLOCK_K == 0  # steps end with K
    if TOKENS == 1:
        result = tl.zeros((BLOCK_N,), tl.float32)
        if on != 0:
            # Products are added up by eights, the 16 bytes that a thread loads at once: partial
            # sums for every channel of a step would take the registers of a second program.
            EIGHT: tl.constexpr = 1 + 7 * (K % 8 == 0)
            chunk = tl.arange(0, BLOCK_K // EIGHT) * EIGHT
            k = chunk[:, None] + tl.arange(0, EIGHT)[None, :]
            offset = channel[:, None, None] * K + k[None, :, :]
            acc = tl.zeros((BLOCK_N, BLOCK_K // EIGHT), tl.float32)
            acc_up = tl.zeros((BLOCK_N, BLOCK_K // EIGHT), tl.float32)
            for start in range(0, K, BLOCK_K):
                ok = start + chunk < K
                a = _loaded(w + start + offset, ok[None, :, None], WHOLE)
                b = _loaded(x + start + k, ok[:, None], WHOLE).to(tl.float32)[None, :, :]
                acc += tl.sum(a.to(tl.float32) * b, axis=2)
                if GLU:
                    c = _loaded(w_up + start + offset, ok[None, :, None], WHOLE)
                    acc_up += tl.sum(c.to(tl.float32) * b, axis=2)
            result = tl.sum(acc, axis=1)
            if GLU:
                result = result / (1.0 + tl.exp(-result)) * tl.sum(acc_up, axis=1)
            if HAS_BIAS:
                result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)
        tl.store(out + columns, result.to(out.dtype.element_ty), mask=column_ok)
    else:
        k = tl.arange(0, BLOCK_K)
        w_tile = w + channel[:, None] * K + k[None, :]
        w_up_tile = w_up + channel[:, None] * K + k[None, :]
        tokens = tl.arange(0, TOKENS)
        token_ok = tokens < M
        result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        if tl.max(on, axis=0) != 0:
            row = tl.where(on != 0, tokens, 0)
            x_tile = x + row.to(tl.int64)[None, :] * K + k[:, None]
            acc_up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
            for start in range(0, K, BLOCK_K):
                ok = start + k < K
                a = _loaded(w_tile, ok[None, :], WHOLE)
                b = _loaded(x_tile, ok[:, None], WHOLE)
                result = tl.dot(a, b, result, input_precision=PRECISION)
                if GLU:
                    c = _loaded(w_up_tile, ok[None, :], WHOLE)
                    acc_up = tl.dot(c, b, acc_up, input_precision=PRECISION)
                x_tile += BLOCK_K
                w_tile += BLOCK_K
                w_up_tile += BLOCK_K
            if GLU:
                result = result / (1.0 + tl.exp(-result)) * acc_up
            if HAS_BIAS:
                result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
        result = tl.where((on != 0)[None, :], result, 0.0)
        tl.store(
            out + tokens.to(tl.int64)[None, :] * N + columns[:, None],
            result.to(out.dtype.element_ty),
            mask=token_ok[None, :] & column_ok[:, None],
        )


@jit
def _loaded(pointers, ok, WHOLE: tl.constexpr):
    """What lies there; zeros where not `ok`, unless the step is whole."""
    if WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=ok, other=0.0)
