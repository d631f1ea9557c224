"""Launching the Triton flash kernel: every card from capability 8.0 on, every kind of range."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._attention.config import AttentionConfig, FlashConfig, head_block
from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels._common.masking import clear_skipped
from pallas_kernels.attention_prefill.flash_kernel import flash_kernel
from pallas_kernels.layout import MaskLayout

LOG2_E = math.log2(math.e)


def attention(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    layout: MaskLayout,
    low: Int32[Array, "B T"],
    high: Int32[Array, "B T"],
    scale: float,
    config: AttentionConfig | None,
) -> Float[Array, "B T Hq d"]:
    """See `reference.attention`. Raises `NotImplementedError` where no Triton kernel runs."""
    triton_support.require_device("attention_prefill", current_device().capability)
    if not isinstance(config, FlashConfig):
        raise NotImplementedError(
            f"attention_prefill: triton has no form for {config}; use a FlashConfig"
        )
    (b, t, hq, d), s = q.shape, k.shape[1]
    before, count = row_counts(layout, b)
    (out,) = triton_support.launch(
        flash_kernel,
        [q, k, v, layout.order, before, count, low, high],
        [t, s, b],
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=math.ceil(t / config.block_m) * b * hq,
        constants=constants(q, k, layout.groups, scale, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    flat = clear_skipped(out.reshape(b * t, hq * d), layout.mask, hq // layout.groups * d)
    return flat.reshape(q.shape)


def row_counts(layout: MaskLayout, rows: int) -> tuple[Int32[Array, "Ga B"], Int32[Array, "Ga B"]]:
    """Active tokens of the rows before each row, and of the row itself, by group."""
    if rows == 1:
        return jnp.zeros_like(layout.count)[:, None], layout.count[:, None]
    by_row = layout.mask.reshape(rows, -1, layout.groups).sum(axis=1, dtype=jnp.int32).T
    return jnp.cumsum(by_row, axis=1, dtype=jnp.int32) - by_row, by_row


def constants(
    q: jax.Array, k: jax.Array, groups: int, scale: float, config: FlashConfig
) -> dict[str, Any]:
    """Compile-time constants of `flash_kernel`."""
    d = q.shape[-1]
    return dict(
        HQ=q.shape[2],
        HK=k.shape[2],
        D=d,
        GROUPS=groups,
        SCALE=scale * LOG2_E,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(d),
    )
