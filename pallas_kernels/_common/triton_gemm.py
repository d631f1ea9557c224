"""Launching the Triton bodies of the output-pruned GEMMs (shared by `gemm_mn` and `swiglu_up`)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Bool, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.config import Config, PersistentConfig, SmallConfig, TileConfig
from pallas_kernels._common.forms import next_power_of_two
from pallas_kernels._common.persistent_kernel import persistent_kernel
from pallas_kernels._common.small_kernel import small_kernel
from pallas_kernels._common.split_kernel import split_k_kernel, sum_kernel
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
    if isinstance(config, SmallConfig) and config.splits > 1:
        return _split_gemm(x, weights, bias, layout, group_size, config)
    call = arguments(x, weights, bias, layout, group_size, config)
    (out,) = triton_support.launch(
        call.kernel,
        call.arrays,
        [m],
        [jax.ShapeDtypeStruct((m, n), x.dtype)],
        grid=call.grid,
        constants=call.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _split_gemm(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "N K"], ...],
    bias: Float[Array, " N"] | None,
    layout: MaskLayout,
    group_size: int,
    config: SmallConfig,
) -> Float[Array, "M N"]:
    """The small form in two kernels: float32 sums of parts of K, and their sum in order."""
    (m, k), n = x.shape, weights[0].shape[0]
    shared = dict(
        N=n, G=group_size, GROUPS=layout.groups, GLU=len(weights) == 2, SPLITS=config.splits
    )
    (sums,) = triton_support.launch(
        split_k_kernel,
        [x, weights[0], weights[-1], layout.mask],
        [m],
        [jax.ShapeDtypeStruct((config.splits, len(weights), m, n), jnp.float32)],
        grid=config.splits * layout.groups * math.ceil(group_size / config.block_n),
        constants=dict(
            shared,
            K=k,
            PRECISION="ieee" if x.dtype == jnp.float32 else "tf32",
            TOKENS=max(16, next_power_of_two(m)),
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    block = 128 if m <= 16 else 512
    (out,) = triton_support.launch(
        sum_kernel,
        [sums, weights[0] if bias is None else bias, layout.mask],
        [m],
        [jax.ShapeDtypeStruct((m, n), x.dtype)],
        grid=math.ceil(m * n / block),
        constants=dict(shared, HAS_BIAS=bias is not None, BLOCK=block),
        num_warps=4,
        num_stages=1,
    )
    return out


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel with its operands, compile-time constants and number of programs."""

    kernel: Any
    arrays: list[Any]
    constants: dict[str, Any]
    grid: int


def arguments(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "N K"], ...],
    bias: Float[Array, " N"] | None,
    layout: MaskLayout,
    group_size: int,
    config: Config,
) -> Call:
    """The kernel that `config` names, and what it is called with."""
    (m, k), n = x.shape, weights[0].shape[0]
    constants: dict[str, Any] = dict(
        N=n,
        K=k,
        G=group_size,
        GROUPS=layout.groups,
        GLU=len(weights) == 2,
        HAS_BIAS=bias is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
    )
    precision = "ieee" if x.dtype == jnp.float32 else "tf32"
    tiles_n = layout.groups * math.ceil(group_size / config.block_n)
    # An operand that is not read still takes its place in the kernel's signature.
    operands = [x, weights[0], weights[-1], weights[0] if bias is None else bias]
    match config:
        case TileConfig():
            constants |= dict(
                PRECISION=precision,
                BLOCK_M=config.block_m,
                BAND=config.band,
                WIDE=max(m * k, n * k, m * layout.groups) >= 2**31,
                SHARE_ZEROS=config.share_zeros,
                HALVES=config.halves,
                ZERO_ROWS=zero_rows(config, k),
            )
            grid = math.ceil(m / config.block_m) * tiles_n
            return Call(tile_kernel, [*operands, layout.order, layout.count], constants, grid)
        case PersistentConfig():
            constants |= dict(
                GROUPS_POWER=next_power_of_two(layout.groups),
                COMPACT=config.compact,
                BLOCK_M=config.block_m,
                BAND=config.band,
                STAGES=config.num_stages,
                PROGRAMS=config.programs,
                ZERO_ROWS=zero_rows(config, k),
            )
            arrays = [*operands, layout.order, layout.count, layout.mask]
            return Call(persistent_kernel, arrays, constants, config.programs)
        case SmallConfig():
            tokens = 1 if m == 1 else max(16, triton.next_power_of_2(m))
            constants |= dict(PRECISION=precision, TOKENS=tokens)
            return Call(small_kernel, [*operands, layout.mask], constants, tiles_n)
    raise NotImplementedError(f"no product runs with {config}")


def zero_rows(config: TileConfig | PersistentConfig, k: int) -> int:
    """Rows that a program clears a step, so that its loop clears `block_m` of them at least."""
    least = math.ceil(config.block_m / math.ceil(k / config.block_k))
    return next_power_of_two(least)


def zero_skipped(
    y: Float[Array, "M N"], mask: Bool[Array, "M groups"], group_size: int
) -> Float[Array, "M N"]:
    """`where(mask, y, 0)` by writing the skipped pairs only, in y's own buffer."""
    m, n = y.shape
    constants = zero_constants(m, n, group_size, mask.shape[1])
    blocks = math.ceil(mask.shape[1] / constants["GROUPS_A_PROGRAM"])
    (y,) = triton_support.launch(
        zero_kernel,
        [mask],
        [m],
        [],
        grid=math.ceil(m / constants["BLOCK_M"]) * blocks,
        constants=constants,
        num_warps=4,
        num_stages=1,
        in_place=[y],
    )
    return y


def zero_constants(m: int, n: int, group_size: int, groups: int) -> dict[str, int]:
    """Compile-time constants of `zero_kernel`: programs of about 256 channels."""
    block_n = min(256, next_power_of_two(group_size))
    return dict(
        N=n,
        G=group_size,
        GROUPS=groups,
        GROUPS_A_PROGRAM=min(256 // block_n, next_power_of_two(groups)),
        BLOCK_M=64 if m > 64 else 4,
        BLOCK_N=block_n,
    )
