"""The public function of the fused rotation and cache write."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels._common import triton_support
from pallas_kernels._common.checks import DTYPES

RopeImplementation = Literal["reference", "triton"]


def rope_cache(
    q: Float[Array, "B T Hq d"] | None,
    k: Float[Array, "B T Hk d"],
    v: Float[Array, "B T Hk d"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    keys: Float[Array, "B S Hk d"],
    values: Float[Array, "B S Hk d"],
    slots: Int[Array, "B T"],
    *,
    q_norm: Float[Array, " d"] | None = None,
    k_norm: Float[Array, " d"] | None = None,
    eps: float = 0.0,
    implementation: RopeImplementation | None = None,
) -> tuple[
    Float[Array, "B T Hq d"] | None,
    Float[Array, "B T Hk d"],
    Float[Array, "B S Hk d"],
    Float[Array, "B S Hk d"],
]:
    """Rotated queries and keys, and the cache with the new keys and values at their slots.

    Pairs (i, i + d/2) of a head are turned by the token's angles, in float32 (rotate-half, as
    Hugging Face has it); before that, where given, each head of q and k is RMS-normed and weighted
    (Qwen3). The cache is updated in place where XLA owns its buffers.

    Args:
        q, k, v: projections of the new tokens, bfloat16, float16 or float32. q is None where
            `attention_prefill` turns the queries itself: its `Rotation`.
        cos, sin: of every token's angles, float32; `half` is d / 2.
        keys, values: the cache, of any of these dtypes.
        slots: where each token's key and value go; outside [0, S): nowhere (padding).
        q_norm, k_norm: weights of the head norms, both or none; without q, k's alone.
        eps: of the head norms.
        implementation: `reference` (jnp) or `triton`: runs or raises. None: `triton` on a CUDA
            device that can, else `reference`.

    Returns:
        q (None without it) and k rotated, then keys and values.

    Raises:
        ValueError: shapes or dtypes that do not fit together, with the numbers.
        NotImplementedError: the named implementation cannot run here; or the result of the kernel
            is being differentiated, or batched by `jax.vmap` where the kernel updates a buffer
            in place.
    """
    _check(q, k, v, cos, sin, keys, values, slots, q_norm, k_norm)
    match implementation or ("triton" if triton_support.runs_here() else "reference"):
        case "reference":
            from pallas_kernels.rope_cache.reference import rope_cache as run
        case "triton":
            from pallas_kernels.rope_cache.triton import rope_cache as run
        case _:
            raise ValueError(f"unknown {implementation=}; known: reference, triton")
    return run(q, k, v, cos, sin, keys, values, slots, q_norm, k_norm, eps)


def _check(q, k, v, cos, sin, keys, values, slots, q_norm, k_norm) -> None:
    batch, tokens, heads, d = k.shape
    capacity = keys.shape[1]
    expected: dict[str, tuple[jax.Array, tuple[int, ...]]] = {
        "v": (v, (batch, tokens, heads, d)),
        "cos": (cos, (batch, tokens, d // 2)),
        "sin": (sin, (batch, tokens, d // 2)),
        "keys": (keys, (batch, capacity, heads, d)),
        "values": (values, (batch, capacity, heads, d)),
        "slots": (slots, (batch, tokens)),
    }
    if q is not None:
        expected["q"] = (q, (batch, tokens, q.shape[2], d))
        if (q_norm is None) != (k_norm is None):
            raise ValueError("rope_cache: give q_norm and k_norm, or none of them")
    elif q_norm is not None:
        raise ValueError("rope_cache: q_norm is given without q; it belongs into `Rotation`")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            expected[name] = (weight, (d,))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"rope_cache: {name} is {array.shape}, expected {shape}")
    found = {name: x.dtype.name for name, x in {"q": q, "k": k, "v": v}.items() if x is not None}
    if len(set(found.values())) > 1 or k.dtype.name not in DTYPES:
        given = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        raise ValueError(
            f"rope_cache: dtypes are {given}: expected one of {', '.join(DTYPES)} for all"
        )
