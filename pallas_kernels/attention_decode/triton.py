"""Launching the split and the merge of decode attention."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._attention.config import AttentionConfig, DecodeConfig, head_block
from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels.attention_decode.split_kernel import merge_kernel, split_kernel
from pallas_kernels.rope_cache.rotation import Rotation

LOG2_E = math.log2(math.e)
# What a program of the merge reads at once: more programs and few reads one after another.
MERGE_SPLITS, MERGE_COLUMNS = 128, 32


class NewTokens(NamedTuple):
    """What a step has of each row's new token: its key and value, not turned, and how to turn."""

    k: Float[Array, "B Hk d"]
    v: Float[Array, "B Hk d"]
    rotation: Rotation  # of queries and keys; its norm is the queries'
    k_norm: Float[Array, " d"] | None


def attention(
    q: Float[Array, "B Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"],
    low: Int32[Array, " B"],
    high: Int32[Array, " B"],
    scale: float,
    config: AttentionConfig | None,
) -> Float[Array, "B Hq d"]:
    """See `reference.attention`. Raises `NotImplementedError` where no Triton kernel runs."""
    return split_and_merge("attention_decode", q, k, v, mask, low, high, scale, config)[0]


def split_and_merge(
    op: str,
    q: Float[Array, "B Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"],
    low: Int32[Array, " B"],
    high: Int32[Array, " B"],
    scale: float,
    config: AttentionConfig | None,
    new: NewTokens | None = None,
) -> tuple[Float[Array, "B Hq d"], Float[Array, "B S Hk d"], Float[Array, "B S Hk d"]]:
    """The two kernels on behalf of `op`: the outputs, k and v; with `new` it is a step (`step.py`).

    Raises `NotImplementedError` where no Triton kernel runs.
    """
    triton_support.require_device(op, current_device().capability)
    if not isinstance(config, DecodeConfig):
        raise NotImplementedError(f"{op}: triton has no form for {config}; use a DecodeConfig")
    (b, hq, d), (s, hk) = q.shape, k.shape[1:3]
    splits = math.ceil(s / config.split)
    statistics = jax.ShapeDtypeStruct((b, hq, splits), jnp.float32)
    # What is not read still takes its place in the kernel's signature; k and v in front, where the
    # buffers are that a step updates.
    cache, step = [k, v], [q] * 6
    if new is not None:
        rotation = new.rotation
        norms = [q if norm is None else norm for norm in (rotation.norm, new.k_norm)]
        step = [new.k, new.v, rotation.cos, rotation.sin, *norms]
    *updated, peaks, totals, sums = triton_support.launch(
        split_kernel,
        [*(cache if new is None else []), q, mask, low, high, *step],
        [s, b, splits],
        [statistics, statistics, jax.ShapeDtypeStruct((b, hq, splits, d), jnp.float32)],
        grid=splits * b * hk,
        constants=split_constants(q, k, mask.shape[1], scale, config, new),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        in_place=[] if new is None else cache,
    )
    (out,) = triton_support.launch(
        merge_kernel,
        [peaks, totals, sums, mask, low, high],
        [splits],
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=b * hq * math.ceil(d / MERGE_COLUMNS),
        constants=merge_constants(q, splits, mask.shape[1], config),
        num_warps=4,
        num_stages=2,
    )
    k, v = updated or cache
    return out, k, v


def split_constants(
    q: jax.Array,
    k: jax.Array,
    groups: int,
    scale: float,
    config: DecodeConfig,
    new: NewTokens | None = None,
) -> dict[str, Any]:
    """Compile-time constants of `split_kernel`."""
    hq, d = q.shape[1:]
    hk = k.shape[2]
    return dict(
        HQ=hq,
        HK=hk,
        D=d,
        GROUPS=groups,
        SCALE=scale * LOG2_E,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
        HEADS=max(16, triton.next_power_of_2(hq // hk)),
        ROWS=triton.next_power_of_2(hq // hk),
        SPLIT=config.split,
        BLOCK_N=config.block_n,
        BLOCK_D=head_block(d),
        STEP=new is not None,
        HAS_NORM=new is not None and new.k_norm is not None,
        EPS=0.0 if new is None else new.rotation.eps,
    )


def merge_constants(q: jax.Array, splits: int, groups: int, config: DecodeConfig) -> dict[str, Any]:
    """Compile-time constants of `merge_kernel`."""
    hq, d = q.shape[1:]
    return dict(
        HQ=hq,
        D=d,
        GROUPS=groups,
        SPLIT=config.split,
        BLOCK_S=min(MERGE_SPLITS, triton.next_power_of_2(splits)),
        BLOCK_C=MERGE_COLUMNS,
    )
