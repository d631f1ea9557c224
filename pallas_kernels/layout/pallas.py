"""The token order in a Pallas kernel (Triton lowering, which JAX deprecates: see docs/kernels.md).

grid (block of BLOCK_M tokens, block of BLOCK_G groups); counts by block come from XLA
active token  -> slot before + its rank among the block's active tokens
skipped token -> slot count + (first token of the block - before) + its rank
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

from pallas_kernels._common import pallas_support
from pallas_kernels._common.device import current_device

BLOCK_M = 256
BLOCK_G = 16


def order_tokens(
    mask: Bool[Array, "M groups"],
) -> tuple[Int32[Array, "groups M"], Int32[Array, " groups"]]:
    """See `reference.order_tokens`."""
    pallas_support.require_device("mask_layout", current_device().capability)
    tokens, groups = mask.shape
    blocks = pl.cdiv(tokens, BLOCK_M)
    padded_groups = pl.cdiv(groups, BLOCK_G) * BLOCK_G
    padding = ((0, blocks * BLOCK_M - tokens), (0, padded_groups - groups))
    active = jnp.pad(mask, padding).astype(jnp.int32)
    partial = active.reshape(blocks, BLOCK_M, padded_groups).sum(axis=1)
    count = partial.sum(axis=0)
    before = jnp.cumsum(partial, axis=0) - partial

    def place(active_ref, before_ref, count_ref, order_ref):
        block, group_block = pl.program_id(0), pl.program_id(1)
        shape = (BLOCK_G, BLOCK_M)  # neighbouring threads hold neighbouring tokens
        token = block * BLOCK_M + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        group = group_block * BLOCK_G + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        on = active_ref[...].T
        rank = jnp.cumsum(on, axis=1) - on
        start = before_ref[...].reshape(BLOCK_G, 1)
        total = count_ref[...].reshape(BLOCK_G, 1)
        slot = jnp.where(on != 0, start + rank, total + (token - start - rank))
        # Padding goes out of range, where the masked store drops it.
        ok = (token < tokens) & (group < groups)
        pallas_support.store(order_ref, (group, jnp.where(ok, slot, tokens)), token, ok)

    order = pallas_support.call(
        place,
        out_shape=jax.ShapeDtypeStruct((groups, tokens), jnp.int32),
        grid=(blocks, padded_groups // BLOCK_G),
        in_specs=[
            pl.BlockSpec((BLOCK_M, BLOCK_G), lambda b, g: (b, g)),
            pl.BlockSpec((1, BLOCK_G), lambda b, g: (b, g)),
            pl.BlockSpec((BLOCK_G,), lambda b, g: (g,)),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        num_warps=4,
        num_stages=1,
        name="mask_layout_place",
    )(active, before, count)
    return order, count[:groups]
