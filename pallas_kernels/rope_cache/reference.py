"""The specification of `rope_cache`, and its CPU path."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rms_norm.reference import rms_norm


def rope_cache(q, k, v, cos, sin, keys, values, slots, q_norm, k_norm, eps):
    """See `pallas_kernels.rope_cache`."""
    if q is not None:
        q = rotated(q, cos, sin, q_norm, eps)
    k = rotated(k, cos, sin, k_norm, eps)
    rows = jnp.arange(slots.shape[0])[:, None]
    slots = jnp.where(slots < 0, keys.shape[1], slots)  # a negative index would count from the end
    keys = keys.at[rows, slots].set(k.astype(keys.dtype), mode="drop")
    values = values.at[rows, slots].set(v.astype(values.dtype), mode="drop")
    return q, k, keys, values


def rotated(
    x: Float[Array, "B T H d"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    norm: Float[Array, " d"] | None,
    eps: float,
) -> Float[Array, "B T H d"]:
    """Every head normed, where there is a norm, and turned by its token's angles."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
