"""Prefill on Hopper: gather the queries, Mosaic GPU attention, scatter the results."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._attention.config import AttentionConfig, MosaicConfig, head_block
from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels.attention_prefill.facts import MOSAIC_HEAD_SIZES
from pallas_kernels.attention_prefill.triton import row_counts
from pallas_kernels.layout import MaskLayout
from pallas_kernels.rope_cache.rotation import Rotation

TMA_ROWS = 8  # slots come to shared memory in tiles of 8: other counts are padded first
BLOCK = 64  # queries of a warpgroup, and slots of a program that gathers or scatters


def attention(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    layout: MaskLayout,
    low: Int32[Array, "B T"],
    high: Int32[Array, "B T"],
    scale: float,
    config: AttentionConfig | None,
    *,
    rotation: Rotation | None,
    from_start: bool,
    all_slots_real: bool,
) -> Float[Array, "B T Hq d"]:
    """See `reference.attention`. Raises `NotImplementedError` for what the kernel cannot do.

    `rotation` is what the gather does to the queries; None: they are rotated already.
    `from_start` promises that `low` is 0 wherever a query sees anything, `all_slots_real` that no
    slot holds a NaN that nobody should see.
    """
    b, t, hq, d = q.shape
    if not isinstance(config, MosaicConfig):
        raise NotImplementedError(
            f"attention_prefill: mosaic has no form for {config}; use a MosaicConfig"
        )
    if q.dtype == jnp.float32 or d not in MOSAIC_HEAD_SIZES:
        raise NotImplementedError(
            f"attention_prefill: mosaic takes bfloat16 and float16, not {q.dtype}, and heads of "
            f"{MOSAIC_HEAD_SIZES}, not {d}; use implementation='triton'"
        )
    interpreting = triton_support.interpreting.get()
    if not interpreting and current_device().capability != "9.0":
        raise NotImplementedError(
            "attention_prefill: mosaic needs a Hopper card (compute capability 9.0), this one has "
            f"{current_device().capability}; use implementation='triton'"
        )
    triton_support.require_device("attention_prefill", current_device().capability)
    from pallas_kernels.attention_prefill.compact_kernel import gather_kernel, scatter_kernel
    from pallas_kernels.attention_prefill.mosaic_kernel import flash_attention

    edges = None
    if not all_slots_real and from_start and k.shape[1] == t:
        # Whole rows: v is no longer than q, and cheaper to clean than to read in two ways.
        end = high.max(axis=1) + 1
        v = jnp.where((jnp.arange(t) < end[:, None])[:, :, None, None], v, 0)
    elif not all_slots_real:
        edges = edge_blocks(v, low, high, config.block_n)
    if k.shape[1] % TMA_ROWS:
        more = ((0, 0), (0, -k.shape[1] % TMA_ROWS), (0, 0), (0, 0))
        k, v = jnp.pad(k, more), jnp.pad(v, more)
    before, count = row_counts(layout, b)
    padded = math.ceil(t / MosaicConfig.BLOCK_M) * MosaicConfig.BLOCK_M
    groups = layout.groups
    blocking: dict[str, Any] = dict(HQ=hq, D=d, GROUPS=groups, BLOCK=BLOCK, BLOCK_D=head_block(d))
    turning: dict[str, Any] = dict(ROTATED=False, HAS_NORM=False, EPS=0.0)
    angles = [q, q, q]  # what is not read still takes its place in the kernel's signature
    if rotation is not None:
        norm = rotation.norm
        turning = dict(ROTATED=True, HAS_NORM=norm is not None, EPS=rotation.eps)
        angles = [rotation.cos, rotation.sin, q if norm is None else norm]
    ranges = jax.ShapeDtypeStruct((groups, b, padded), jnp.int32)
    compact, low_of, high_of, bounds = triton_support.launch(
        gather_kernel,
        [q, *angles, layout.order, before, count, low, high],
        [t, b, padded],
        [
            jax.ShapeDtypeStruct((hq, b, padded, d), q.dtype),
            ranges,
            ranges,
            jax.ShapeDtypeStruct((groups, b, padded // BLOCK, 4), jnp.int32),
        ],
        grid=padded // BLOCK * b * groups,
        constants=blocking | {"KEYS": config.block_n} | turning,
        num_warps=gather_warps(d, rotated=rotation is not None),
        num_stages=1,
    )
    interpret = None
    if interpreting:
        from jax.experimental.pallas import mosaic_gpu

        interpret = mosaic_gpu.InterpretGPUParams(detect_races=True)
    flash = triton_support.not_differentiable(
        lambda *arrays: flash_attention(
            *arrays,
            edges=edges,
            scale=scale,
            config=config,
            from_start=from_start,
            interpret=interpret,
        ),
        "attention_prefill",
    )
    result = flash(compact, k, v, low_of, high_of, bounds, count)
    (out,) = triton_support.launch(
        scatter_kernel,
        [result, layout.order, before, count, layout.count],
        [t, b, padded],
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=math.ceil(t / BLOCK) * b * groups,
        constants=blocking,
        num_warps=4,
        num_stages=1,
    )
    return out


def gather_warps(d: int, *, rotated: bool) -> int:
    """Warps of a program that gathers: turning heads of 256 takes twice the registers of 128."""
    return 8 if rotated and d > 128 else 4


def edge_blocks(
    v: Float[Array, "B S Hk d"],
    low: Int32[Array, "B T"],
    high: Int32[Array, "B T"],
    block_n: int,
) -> tuple[Int32[Array, "B 2"], Float[Array, "B2 n Hk d"]]:
    """Each row's first and last block of v that anybody sees, with zeros in the slots nobody does.

    Every other block between them holds tokens only.
    """
    first, end = low.min(axis=1), high.max(axis=1) + 1
    blocks = jnp.stack([first, jnp.maximum(end - 1, 0)], axis=1) // block_n
    slots = blocks[:, :, None] * block_n + jnp.arange(block_n, dtype=jnp.int32)
    held = (slots >= first[:, None, None]) & (slots < end[:, None, None])
    taken = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(v, slots)
    cleaned = jnp.where(held[..., None, None], taken, 0)
    return blocks, cleaned.reshape(-1, *cleaned.shape[2:])
