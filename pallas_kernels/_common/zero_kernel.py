"""Clearing the skipped (token, group) pairs of a finished product, in place.

The dense path of `gemm_mn` multiplies everything and then needs zeros where the mask is off.
`where(mask, y, 0)` would read and write all of y; this writes the skipped pairs only: nothing at
0 % sparsity, where the dense path is chosen.

    program id -> (token block of BLOCK_M, column block of BLOCK_N)
"""

import triton
import triton.language as tl


@triton.jit
def zero_kernel(
    y,  # [M, N], updated in place
    mask,  # [M, GROUPS] bool
    M,
    N: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCKS_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    rows = pid // BLOCKS_N * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid % BLOCKS_N * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = (rows < M)[:, None] & (columns < N)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    on = tl.load(mask + wide_rows * GROUPS + (columns // G)[None, :], mask=ok, other=1)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), y.dtype.element_ty)
    tl.store(y + wide_rows * N + columns[None, :], zeros, mask=ok & (on.to(tl.int32) == 0))
