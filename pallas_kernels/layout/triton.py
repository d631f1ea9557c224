"""The token order in two Triton kernels: count by blocks of tokens, then place.

program id -> (block of BLOCK_M tokens, block of BLOCK_G groups)
partial[block, g] = active tokens of g in the block
place: before[g] = sum of partial[< block, g]; count[g] = sum of partial[:, g]
       active token  -> slot before + its rank among the block's active tokens
       skipped token -> slot count + (first token of the block - before) + its rank
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Int32

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.jit import jit
from pallas_kernels.layout.api import TRITON_TOKENS

BLOCK_M = 256
BLOCK_G = 16


@jit
def count_kernel(
    mask, M, partial, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Active tokens of each block and group: `partial[blocks, GROUPS]`."""
    BLOCKS_G: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G
    pid = tl.program_id(0)
    block = pid // BLOCKS_G
    tokens = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    groups = pid % BLOCKS_G * BLOCK_G + tl.arange(0, BLOCK_G)
    ok = (tokens < M)[:, None] & (groups < GROUPS)[None, :]
    on = tl.load(mask + tokens[:, None] * GROUPS + groups[None, :], mask=ok, other=0)
    total = tl.sum(on.to(tl.int32), axis=0)
    tl.store(partial + block * GROUPS + groups, total, mask=groups < GROUPS)


@jit
def place_kernel(
    mask,
    partial,
    M,
    blocks,
    order,
    count,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Every token's slot in every group's order, from the blocks' counts."""
    BLOCKS_G: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G
    pid = tl.program_id(0)
    block = pid // BLOCKS_G
    groups = pid % BLOCKS_G * BLOCK_G + tl.arange(0, BLOCK_G)
    group_ok = groups < GROUPS
    earlier = tl.arange(0, BLOCKS)
    sums = tl.load(
        partial + earlier[:, None] * GROUPS + groups[None, :],
        mask=(earlier < blocks)[:, None] & group_ok[None, :],
        other=0,
    )
    total = tl.sum(sums, axis=0)
    before = tl.sum(tl.where((earlier < block)[:, None], sums, 0), axis=0)
    if block == 0:
        tl.store(count + groups, total, mask=group_ok)

    first = block * BLOCK_M
    tokens = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    loaded = tl.load(
        mask + tokens[:, None] * GROUPS + groups[None, :],
        mask=(tokens < M)[:, None] & group_ok[None, :],
        other=0,
    )
    # From here on a row is a group: neighbouring threads hold neighbouring tokens, whose slots
    # are neighbours too, so the scattered stores fill whole sectors.
    on = tl.trans(loaded.to(tl.int32))
    rank = tl.cumsum(on, axis=1) - on
    skipped_rank = tl.arange(0, BLOCK_M)[None, :] - rank
    slot = tl.where(
        on != 0, before[:, None] + rank, (total + first - before)[:, None] + skipped_rank
    )
    value = tl.broadcast_to((first + tl.arange(0, BLOCK_M))[None, :], (BLOCK_G, BLOCK_M))
    tl.store(
        order + groups.to(tl.int64)[:, None] * M + slot,
        value,
        mask=group_ok[:, None] & (tokens < M)[None, :],
    )


def order_tokens(
    mask: Bool[Array, "M groups"],
) -> tuple[Int32[Array, "groups M"], Int32[Array, " groups"]]:
    """See `reference.order_tokens`."""
    triton_support.require_device("mask_layout", current_device().capability)
    tokens, groups = mask.shape
    blocks = math.ceil(tokens / BLOCK_M)
    if tokens > TRITON_TOKENS:
        raise NotImplementedError(
            f"mask_layout: the triton implementation orders up to {TRITON_TOKENS} tokens at a "
            f"time, got {tokens}; use implementation='xla'"
        )
    grid = blocks * math.ceil(groups / BLOCK_G)
    blocking = dict(GROUPS=groups, BLOCK_M=BLOCK_M, BLOCK_G=BLOCK_G)
    (partial,) = triton_support.launch(
        count_kernel,
        [mask],
        [tokens],
        [jax.ShapeDtypeStruct((blocks, groups), jnp.int32)],
        grid=grid,
        constants=blocking,
        num_warps=4,
        num_stages=1,
    )
    order, count = triton_support.launch(
        place_kernel,
        [mask, partial],
        [tokens, blocks],
        [
            jax.ShapeDtypeStruct((groups, tokens), jnp.int32),
            jax.ShapeDtypeStruct((groups,), jnp.int32),
        ],
        grid=grid,
        constants=dict(blocking, BLOCKS=triton.next_power_of_2(blocks)),
        num_warps=4,
        num_stages=1,
    )
    return order, count
