"""Clearing the skipped (token, group) pairs of a finished product, in place.

The dense path multiplies everything and then needs zeros where the mask is off. `where(mask, y, 0)`
would read and write all of y; this reads the mask and writes the skipped pairs only: next to
nothing at 0 % sparsity, where the dense path is chosen.

    program id -> (block of BLOCK_M tokens, block of GROUPS_A_PROGRAM groups)
                  of each group G channels, BLOCK_N at a time
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
    GROUPS_A_PROGRAM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUPS + GROUPS_A_PROGRAM - 1) // GROUPS_A_PROGRAM
    pid = tl.program_id(0)
    groups = pid % BLOCKS * GROUPS_A_PROGRAM + tl.arange(0, GROUPS_A_PROGRAM)
    rows = (pid // BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = (rows < M)[:, None] & (groups < GROUPS)[None, :]
    on = tl.load(mask + rows[:, None] * GROUPS + groups[None, :], mask=inside, other=1)
    off = on.to(tl.int32) == 0
    if tl.max(tl.max(off.to(tl.int32), axis=1), axis=0) != 0:
        for start in range(0, G, BLOCK_N):
            channels = start + tl.arange(0, BLOCK_N)
            columns = groups[:, None] * G + channels[None, :]
            column_ok = (channels < G)[None, :] & (columns < N)
            tl.store(
                y + (rows[:, None, None] * N + columns[None, :, :]),
                tl.zeros((BLOCK_M, GROUPS_A_PROGRAM, BLOCK_N), y.dtype.element_ty),
                mask=off[:, :, None] & column_ok[None, :, :],
            )
