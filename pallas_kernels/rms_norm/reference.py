"""The specification of `rms_norm`, and its CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*M D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*M D"]:
    """See `pallas_kernels.rms_norm`; over the last axis of any array."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight * (x32 * scale).astype(x.dtype)
