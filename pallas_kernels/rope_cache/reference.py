"""The specification of `rope_cache`, and its CPU path."""

import jax.numpy as jnp

from pallas_kernels.rms_norm.reference import rms_norm


def rope_cache(q, k, v, cos, sin, keys, values, slots, q_norm, k_norm, eps):
    """See `pallas_kernels.rope_cache`."""
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    rows = jnp.arange(slots.shape[0])[:, None]
    slots = jnp.where(slots < 0, keys.shape[1], slots)  # a negative index would count from the end
    keys = keys.at[rows, slots].set(k.astype(keys.dtype), mode="drop")
    values = values.at[rows, slots].set(v.astype(values.dtype), mode="drop")
    return q, k, keys, values


def _rotated(x, cos, sin):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
