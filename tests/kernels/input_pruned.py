"""The kernels of `gemm_k` as `compile_usage` takes them."""

from typing import Any

import triton

from pallas_kernels._common.config import KTileConfig, SmallConfig
from pallas_kernels._common.cubin import TYPE_NAMES
from pallas_kernels.gemm_k.small_kernel import k_small_kernel
from pallas_kernels.gemm_k.sum_kernel import k_sum_kernel
from pallas_kernels.gemm_k.tile_kernel import k_tile_kernel
from pallas_kernels.layout.k_axis import TILE


def tile_build(
    config: KTileConfig, dtype: str, *, one_pass: bool, extra: bool = False
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Kernel, signature and constants: Llama-3.1-8B's output projection (one pass), or down.

    `extra`: with a bias and a residual, which only the one-pass form adds itself.
    """
    single = dtype == "float32"
    kind = TYPE_NAMES[dtype]
    partial = kind if one_pass or single else "*fp16"
    signature = dict.fromkeys(("h", "w", "bias", "residual"), kind) | dict(
        rows="*i32", tiles="*i32", M="i32", tiles_m="i32", out=partial, scale="*fp32"
    )
    constants = dict(
        N=4096,
        K=4096 if one_pass else 14336,
        G=512 if one_pass else max(128, config.block_k),
        SUPERS=1 if one_pass else 14,
        SIZE=8,
        HAS_BIAS=extra,
        HAS_RESIDUAL=extra,
        SCALED=not one_pass and not single,
        PRECISION="ieee" if single else "tf32",
        WIDE=False,
        TILE=TILE,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        COLUMN_TILES=config.column_tiles,
        BAND=config.band,
        PIECES=max(config.block_n // 64, 1),
    )
    return k_tile_kernel, signature, constants


def small_build(
    config: SmallConfig, dtype: str, tokens: int
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The form for few tokens, on the down projection."""
    kind = TYPE_NAMES[dtype]
    signature = dict.fromkeys(("h", "w", "bias", "residual", "out"), kind)
    signature |= dict(mask="*i1", M="i32")
    constants = dict(
        N=4096,
        K=14336,
        G=128,
        GROUPS=112,
        HAS_BIAS=False,
        HAS_RESIDUAL=True,
        PRECISION="ieee" if dtype == "float32" else "tf32",
        TOKENS=1 if tokens == 1 else max(16, triton.next_power_of_2(tokens)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        CHUNK=8,
    )
    return k_small_kernel, signature, constants


def sum_build(dtype: str) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The sum of 14 partial sums, with a residual."""
    kind = TYPE_NAMES[dtype]
    single = dtype == "float32"
    signature = dict(partial=kind if single else "*fp16", scale="*fp32", mask="*i1", M="i32")
    signature |= dict.fromkeys(("bias", "residual", "out"), kind)
    constants = dict(
        N=4096,
        GROUPS=112,
        SUPERS=14,
        SIZE=8,
        HAS_BIAS=True,
        HAS_RESIDUAL=True,
        SCALED=not single,
        SCALES=32,
        SCALE_N=128,
        BLOCK_M=8,
        BLOCK_N=256,
    )
    return k_sum_kernel, signature, constants
