"""Launching the Triton kernels of the input-pruned product."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.config import KTileConfig, SmallConfig
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.problem import SMALL_TOKENS
from pallas_kernels.gemm_k.small_kernel import k_small_kernel
from pallas_kernels.gemm_k.sum_kernel import k_sum_kernel
from pallas_kernels.gemm_k.tile_kernel import k_tile_kernel
from pallas_kernels.layout import MaskLayout
from pallas_kernels.layout.api import k_order_of
from pallas_kernels.layout.k_axis import TILE, KOrder


def gemm_k(
    h: Float[Array, "M K"],
    w: Float[Array, "N K"],
    layout: MaskLayout,
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    group_size: int,
    config: KTileConfig | SmallConfig,
) -> Float[Array, "M N"]:
    """See `reference.gemm_k`."""
    if isinstance(config, SmallConfig):
        return _small(h, w, layout, bias, residual, group_size, config)
    order = k_order_of(layout)
    arrays, scalars, out, constants, grid = tile_arguments(
        h, w, order, bias, residual, group_size, config
    )
    result, scale = triton_support.launch(
        k_tile_kernel,
        arrays,
        scalars,
        out,
        grid=grid,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if result.ndim == 2:
        return result
    return _sum(result, scale, layout, bias, residual, order.size, h.dtype)


def _sum(
    partial: Float[Array, "supers M N"],
    scale: Float[Array, "scales column_tiles tokens"],
    layout: MaskLayout,
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    size: int,
    dtype: Any,
) -> Float[Array, "M N"]:
    supers, m, n = partial.shape
    columns = min(256, triton.next_power_of_2(n))
    block_m = 2048 // columns
    (y,) = triton_support.launch(
        k_sum_kernel,
        [partial, scale, layout.mask, _given(bias, partial), _given(residual, partial)],
        [m],
        [jax.ShapeDtypeStruct((m, n), dtype)],
        grid=math.ceil(m / block_m) * math.ceil(n / columns),
        constants=dict(
            N=n,
            GROUPS=layout.groups,
            SUPERS=supers,
            SIZE=size,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            SCALED=partial.dtype == jnp.float16,
            SCALES=scale.shape[1],
            SCALE_N=scale_columns(n, scale.shape[1]),
            BLOCK_M=block_m,
            BLOCK_N=columns,
        ),
        num_warps=4,
        num_stages=1,
    )
    return y


def scale_columns(n: int, column_tiles: int) -> int:
    """Outputs that share a scale: the width of a column tile, a power of two."""
    return next_power_of_two(math.ceil(n / column_tiles))


def tile_arguments(
    h: Float[Array, "M K"],
    w: Float[Array, "N K"],
    order: KOrder,
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    group_size: int,
    config: KTileConfig,
) -> tuple[list[Any], list[int], list[Any], dict[str, Any], int]:
    """Operands, scalars, outputs, compile-time constants and grid of `k_tile_kernel`."""
    (m, k), n = h.shape, w.shape[0]
    supers, tiles = order.tiles.shape[:2]
    tiles_n = math.ceil(n / config.block_n)
    single = h.dtype == jnp.float32
    if supers == 1:
        out = jax.ShapeDtypeStruct((m, n), h.dtype)
    else:
        out = jax.ShapeDtypeStruct((supers, m, n), jnp.float32 if single else jnp.float16)
    scaled = supers > 1 and not single
    scale = jax.ShapeDtypeStruct((supers, tiles_n, m) if scaled else (1, 1, 1), jnp.float32)
    constants = dict(
        N=n,
        K=k,
        G=group_size,
        SUPERS=supers,
        SIZE=order.size,
        HAS_BIAS=bias is not None and supers == 1,
        HAS_RESIDUAL=residual is not None and supers == 1,
        SCALED=scaled,
        PRECISION="ieee" if single else "tf32",
        WIDE=m * k >= 2**31,
        TILE=TILE,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        COLUMN_TILES=config.column_tiles,
        BAND=config.band,
        PIECES=max(config.block_n // 64, 1),
    )
    arrays = [h, w, _given(bias, h), _given(residual, h), order.rows, order.tiles]
    grid = supers * tiles * math.ceil(tiles_n / config.column_tiles)
    return arrays, [m, tiles], [out, scale], constants, grid


def _small(
    h: Float[Array, "M K"],
    w: Float[Array, "N K"],
    layout: MaskLayout,
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    group_size: int,
    config: SmallConfig,
) -> Float[Array, "M N"]:
    (m, k), n = h.shape, w.shape[0]
    if m > SMALL_TOKENS:
        raise NotImplementedError(f"the small form takes up to {SMALL_TOKENS} tokens, got {m=}")
    (y,) = triton_support.launch(
        k_small_kernel,
        [h, w, _given(bias, h), _given(residual, h), layout.mask],
        [m],
        [jax.ShapeDtypeStruct((m, n), h.dtype)],
        grid=math.ceil(n / config.block_n),
        constants=dict(
            N=n,
            K=k,
            G=group_size,
            GROUPS=layout.groups,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            PRECISION="ieee" if h.dtype == jnp.float32 else "tf32",
            TOKENS=1 if m == 1 else max(16, triton.next_power_of_2(m)),
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            CHUNK=small_chunk(k, group_size),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y


def small_chunk(k: int, group_size: int) -> int:
    """Channels that share one look at the mask, for one token: at most a 16-byte load of them."""
    return math.gcd(8, k, group_size)


def _given(operand: jax.Array | None, instead: jax.Array) -> jax.Array:
    """An operand that is not read still takes its place in the kernel's signature."""
    return instead if operand is None else operand
