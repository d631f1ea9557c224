"""The compacted form in Pallas: the tile of `_common/tile_kernel.py`, one body for both ops.

The order of programs and the meaning of a tile are the same (see the drawing there); the tiles
past `count[group]` write their own zeros. Weights are read as two tiles (gate, up).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels._common import pallas_support
from pallas_kernels._common.config import TileConfig
from pallas_kernels.layout import MaskLayout


def tile_gemm(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "N K"], ...],
    bias: Float[Array, " N"] | None,
    layout: MaskLayout,
    group_size: int,
    config: TileConfig,
) -> Float[Array, "M N"]:
    """`x w^T`, or `silu(x w_gate^T) (x w_up^T)` for two weights, on the active groups only."""
    m, k_size = x.shape
    n = weights[0].shape[0]
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    tiles_group = pl.cdiv(group_size, bn)
    tiles_n = layout.groups * tiles_group
    tiles_m = pl.cdiv(m, bm)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def body(*refs):
        x_ref, *w_refs, order_ref, count_ref, out_ref = refs
        bias_ref = w_refs.pop() if bias is not None else None
        pid = pl.program_id(0)
        band = jax.lax.div(pid, config.band * tiles_n)
        in_band = pid - band * (config.band * tiles_n)
        width = jnp.minimum(tiles_m - band * config.band, config.band)
        tile_m = band * config.band + jax.lax.rem(in_band, width)
        tile_n = jax.lax.div(in_band, width)
        group = jax.lax.div(tile_n, tiles_group)
        active = pallas_support.load(count_ref, (jnp.full((1,), group),)).sum()

        slots = tile_m * bm + jnp.arange(bm)
        columns = group * group_size + jax.lax.rem(tile_n, tiles_group) * bn + jnp.arange(bn)
        column_ok = columns < jnp.minimum(group * group_size + group_size, n)
        safe_slots = jnp.minimum(slots, m - 1)
        rows = pallas_support.load(order_ref, (jnp.full((bm,), group), safe_slots))

        def product():
            channel = jnp.minimum(columns, n - 1)

            def step(i, sums):
                k = i * bk + jnp.arange(bk)
                k_ok = None if k_size % bk == 0 else (k < k_size)
                safe_k = k if k_ok is None else jnp.minimum(k, k_size - 1)
                x_ok = None if k_ok is None else k_ok[None, :]
                w_ok = None if k_ok is None else k_ok[:, None]
                a = pallas_support.load(x_ref, (rows[:, None], safe_k[None, :]), x_ok)
                return tuple(
                    total
                    + plgpu.dot(
                        a,
                        pallas_support.load(w_ref, (channel[None, :], safe_k[:, None]), w_ok),
                        precision=precision,
                    )
                    for w_ref, total in zip(w_refs, sums, strict=True)
                )

            zeros = tuple(jnp.zeros((bm, bn), jnp.float32) for _ in w_refs)
            sums = jax.lax.fori_loop(0, pl.cdiv(k_size, bk), step, zeros)
            y = sums[0] if len(sums) == 1 else sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1]
            if bias_ref is not None:
                y = y + pallas_support.load(bias_ref, (channel,)).astype(jnp.float32)[None, :]
            return jnp.where((slots < active)[:, None], y, 0.0)

        y = jax.lax.cond(tile_m * bm < active, product, lambda: jnp.zeros((bm, bn), jnp.float32))
        ok = (slots < m)[:, None] & column_ok[None, :]
        # Slots past the end go to rows past the end, and are masked off.
        out_rows = jnp.where(slots < m, rows, slots)
        pallas_support.store(
            out_ref,
            (out_rows[:, None], jnp.where(column_ok, columns, n + columns)[None, :]),
            y.astype(out_ref.dtype),
            ok,
        )

    arrays = [x, *weights, *([] if bias is None else [bias]), layout.order, layout.count]
    return pallas_support.call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(tiles_m * tiles_n,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="output_pruned_tile",
    )(*arrays)
