"""`gemm_k` in Pallas: the tile of `tile_kernel.py`, one a program, and float32 partial sums.

Every super-group writes all its tokens' partial sums (a token is in exactly one of its tiles), and
XLA adds them up. One body for any number of tokens; the Triton lowering is deprecated by JAX.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels._common import pallas_support
from pallas_kernels._common.config import KTileConfig
from pallas_kernels.layout.k_axis import TILE, KOrder


def gemm_k(
    h: Float[Array, "M K"],
    w: Float[Array, "N K"],
    order: KOrder,
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    group_size: int,
    config: KTileConfig,
) -> Float[Array, "M N"]:
    """See `reference.gemm_k`."""
    (m, k_size), n = h.shape, w.shape[0]
    supers, tiles = order.tiles.shape[:2]
    bn, bk = config.block_n, config.block_k
    tiles_n = pl.cdiv(n, bn)
    steps_group = pl.cdiv(group_size, bk)
    precision = jax.lax.Precision.HIGHEST if h.dtype == jnp.float32 else None

    def body(h_ref, w_ref, rows_ref, tiles_ref, out_ref):
        pid = pl.program_id(0)
        tile_n = jax.lax.rem(pid, tiles_n)
        tile = jax.lax.div(pid, tiles_n)  # of all super-groups
        super_group = jax.lax.div(tile, tiles)
        groups, counts = (_scalar(tiles_ref, 2 * tile + i) for i in range(2))
        lanes = jnp.arange(TILE)
        entries = pallas_support.load(rows_ref, (tile * TILE + lanes,))
        row_ok = lanes < jax.lax.shift_right_arithmetic(counts, 8)
        token = jnp.where(row_ok, entries & 0xFFFFFF, 0)
        pattern = jnp.where(row_ok, jax.lax.shift_right_logical(entries, 24), 0)
        columns = tile_n * bn + jnp.arange(bn)
        column = jnp.minimum(columns, n - 1)

        def step(i, total):
            nth = jax.lax.div(i, steps_group)
            group = jax.lax.shift_right_logical(groups, 4 * nth) & 15
            in_group = jax.lax.rem(i, steps_group) * bk + jnp.arange(bk)
            k = (super_group * order.size + group) * group_size + in_group
            k_ok = (in_group < group_size) & (k < k_size)
            safe_k = jnp.minimum(k, k_size - 1)
            on = (jax.lax.shift_right_logical(pattern, group) & 1) != 0
            a = pallas_support.load(
                h_ref, (token[:, None], safe_k[None, :]), on[:, None] & k_ok[None, :]
            )
            b = pallas_support.load(w_ref, (column[None, :], safe_k[:, None]), k_ok[:, None])
            return total + plgpu.dot(a, b, precision=precision)

        steps = (counts & 0xFF) * steps_group
        total = jax.lax.fori_loop(0, steps, step, jnp.zeros((TILE, bn), jnp.float32))
        # Rows and columns past the end go out of range, where the masked store drops them.
        row = jnp.where(row_ok, super_group * m + token, supers * m + lanes)
        ok = row_ok[:, None] & (columns < n)[None, :]
        at_column = jnp.where(columns < n, columns, n + columns)
        pallas_support.store(out_ref, (row[:, None], at_column[None, :]), total, ok)

    partial = pallas_support.call(
        body,
        out_shape=jax.ShapeDtypeStruct((supers * m, n), jnp.float32),
        grid=(supers * tiles * tiles_n,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="input_pruned_tile",
    )(h, w, order.rows.reshape(-1), order.tiles.reshape(-1))
    y = partial.reshape(supers, m, n).sum(axis=0)
    for term in (bias, residual):
        if term is not None:
            y = y + term.astype(jnp.float32)
    return y.astype(h.dtype)


def _scalar(ref, index: jax.Array) -> jax.Array:
    return pallas_support.load(ref, (jnp.full((1,), index),)).sum()
