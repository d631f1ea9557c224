"""The specification of `norm_route`, and its CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.norm_route.api import RouterWeights


def norm_route(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    eps: float,
    threshold: float,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"]]:
    """See `pallas_kernels.norm_route`."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    normed = norm_weight * (x32 * scale).astype(x.dtype)
    compressed = _linear(x32, weights.compressor, weights.compressor_bias)
    logits = _linear(compressed, weights.router, weights.router_bias)
    return normed, logits[:, 0::2] - logits[:, 1::2] >= threshold


def _linear(x, weight, bias):
    return jnp.einsum("mk,nk->mn", x, weight, precision=jax.lax.Precision.HIGHEST) + bias
