"""Launching the Triton bodies of the output-pruned GEMMs (shared by `gemm_mn` and `swiglu_up`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Bool, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.config import Config, SmallConfig, TileConfig
from pallas_kernels._common.problem import SMALL_TOKENS
from pallas_kernels._common.small_kernel import small_kernel
from pallas_kernels._common.tile_kernel import tile_kernel
from pallas_kernels._common.zero_kernel import zero_kernel
from pallas_kernels.layout import MaskLayout


def pruned_gemm(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "N K"], ...],
    bias: Float[Array, " N"] | None,
    layout: MaskLayout,
    group_size: int,
    config: Config,
) -> Float[Array, "M N"]:
    """`x w^T + bias`, or `silu(x w_gate^T) (x w_up^T)` for two weights, on active groups only."""
    m, n = x.shape[0], weights[0].shape[0]
    arrays, constants, grid = arguments(x, weights, bias, layout, group_size, config)
    (out,) = triton_support.launch(
        tile_kernel if isinstance(config, TileConfig) else small_kernel,
        arrays,
        [m],
        [jax.ShapeDtypeStruct((m, n), x.dtype)],
        grid=grid,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def arguments(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "N K"], ...],
    bias: Float[Array, " N"] | None,
    layout: MaskLayout,
    group_size: int,
    config: Config,
) -> tuple[list[Any], dict[str, Any], int]:
    """Operands, compile-time constants and grid of the kernel that `config` names."""
    (m, k), n = x.shape, weights[0].shape[0]
    constants: dict[str, Any] = dict(
        N=n,
        K=k,
        G=group_size,
        GROUPS=layout.groups,
        GLU=len(weights) == 2,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == jnp.float32 else "tf32",
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
    )
    tiles_n = layout.groups * math.ceil(group_size / config.block_n)
    # An operand that is not read still takes its place in the kernel's signature.
    operands = [x, weights[0], weights[-1], weights[0] if bias is None else bias]
    match config:
        case TileConfig():
            wide = max(m * k, n * k, m * layout.groups) >= 2**31
            constants |= dict(
                BLOCK_M=config.block_m,
                BAND=config.band,
                WIDE=wide,
                ZERO_ROWS_PER_STEP=triton.next_power_of_2(
                    triton.cdiv(config.block_m, triton.cdiv(k, config.block_k))
                ),
            )
            grid = math.ceil(m / config.block_m) * tiles_n
            return [*operands, layout.order, layout.count], constants, grid
        case SmallConfig():
            if m > SMALL_TOKENS:
                raise NotImplementedError(f"the small form takes up to 64 tokens, got {m=}")
            constants |= dict(TOKENS=1 if m == 1 else max(16, triton.next_power_of_2(m)))
            return [*operands, layout.mask], constants, tiles_n


def zero_skipped(
    y: Float[Array, "M N"], mask: Bool[Array, "M groups"], group_size: int
) -> Float[Array, "M N"]:
    """`where(mask, y, 0)` by writing the skipped pairs only, in y's own buffer."""
    m, n = y.shape
    groups = mask.shape[1]
    block_m = 64 if m > 64 else 4
    block_n = min(256, triton.next_power_of_2(group_size))
    (y,) = triton_support.launch(
        zero_kernel,
        [mask],
        [m],
        [],
        grid=math.ceil(m / block_m) * groups,
        constants=dict(N=n, G=group_size, GROUPS=groups, BLOCK_M=block_m, BLOCK_N=block_n),
        num_warps=4,
        num_stages=1,
        in_place=[y],
    )
    return y
