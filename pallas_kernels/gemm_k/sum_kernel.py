"""The partial sums of all super-groups, added up in order, with bias and residual.

program id -> (block of tokens, block of columns); float32 sums; one pass over the partial sums,
bound by memory. A token that skips a whole super-group has no partial sum there.
"""

# pyrefly: ignore-errors
# (Triton types a compile-time value as its wrapper, and plain operators do not know it.)
import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
def k_sum_kernel(
    partial,  # [SUPERS, M, N]
    scale,  # [SUPERS, column tiles, M] float32, read if SCALED
    mask,  # [M, GROUPS] bool
    bias,  # [N], read if HAS_BIAS
    residual,  # [M, N], read if HAS_RESIDUAL
    M,
    out,  # [M, N]
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    SUPERS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    SCALES: tl.constexpr,  # column tiles
    SCALE_N: tl.constexpr,  # columns of one, a power of two: they share a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up one block of outputs."""
    BLOCKS_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = BLOCK_N // SCALE_N if BLOCK_N > SCALE_N else 1
    pid = tl.program_id(0)
    tokens = (pid // BLOCKS_N * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    first = pid % BLOCKS_N * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    token_ok = tokens < M
    ok = token_ok[:, None] & (columns < N)[None, :]
    offsets = tokens[:, None] * N + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    bit = tl.arange(0, 8)
    for super_group in tl.static_range(SUPERS):
        group = super_group * SIZE + bit
        any_on = tl.load(
            mask + tokens[:, None] * GROUPS + group[None, :],
            mask=token_ok[:, None] & ((bit < SIZE) & (group < GROUPS))[None, :],
            other=0,
        )
        on = tl.max(any_on.to(tl.int32), axis=1) != 0
        values = tl.load(
            partial + (tl.full((), super_group, tl.int64) * M * N + offsets),
            mask=ok & on[:, None],
            other=0.0,
        ).to(tl.float32)
        if SCALED:
            at = scale + tl.full((), super_group, tl.int64) * SCALES * M
            if PARTS == 1:
                factor = tl.load(at + first // SCALE_N * M + tokens, mask=token_ok & on, other=0.0)
                values *= factor[:, None]
            else:
                part = first // SCALE_N + tl.arange(0, PARTS)
                factor = tl.load(
                    at + part[None, :] * M + tokens[:, None],
                    mask=(token_ok & on)[:, None] & (part < SCALES)[None, :],
                    other=0.0,
                )
                parted = tl.reshape(values, (BLOCK_M, PARTS, SCALE_N)) * factor[:, :, None]
                values = tl.reshape(parted, (BLOCK_M, BLOCK_N))
        total += values
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + offsets, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=ok)
