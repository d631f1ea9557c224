"""Clearing the skipped (token, group) pairs of a finished product, in place.

The dense path multiplies everything and then needs zeros where the mask is off. `where(mask, y, 0)`
would read and write all of y; this reads the mask and writes the skipped pairs only: next to
nothing at 0 % sparsity, where the dense path is chosen.

    program id -> (block of BLOCK_M tokens, group);   G channels, BLOCK_N at a time
"""

import triton.language as tl

from pallas_kernels._common.jit import jit


@jit
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
    pid = tl.program_id(0)
    group = pid % GROUPS
    rows = (pid // GROUPS * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    on = tl.load(mask + rows * GROUPS + group, mask=rows < M, other=1).to(tl.int32)
    if tl.min(on, axis=0) == 0:
        for start in range(0, G, BLOCK_N):
            columns = group * G + start + tl.arange(0, BLOCK_N)
            column_ok = columns < tl.minimum(group * G + G, N)
            tl.store(
                y + (rows[:, None] * N + columns[None, :]),
                tl.zeros((BLOCK_M, BLOCK_N), y.dtype.element_ty),
                mask=(on == 0)[:, None] & column_ok[None, :],
            )
