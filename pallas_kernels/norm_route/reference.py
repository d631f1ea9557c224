"""The specification of `norm_route`, and its CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.norm_route.api import RouterWeights
from pallas_kernels.rms_norm.reference import rms_norm


def norm_route(
    x: Float[Array, "M D"],
    norm_weight: Float[Array, " D"],
    weights: RouterWeights,
    eps: float,
    threshold: float,
) -> tuple[Float[Array, "M D"], Bool[Array, "M groups"]]:
    """See `pallas_kernels.norm_route`."""
    normed = rms_norm(x, norm_weight, eps)
    compressed = _linear(x.astype(jnp.float32), weights.compressor, weights.compressor_bias)
    logits = _linear(compressed, weights.router, weights.router_bias)
    return normed, logits[:, 0::2] - logits[:, 1::2] >= threshold


def _linear(x, weight, bias):
    return jnp.einsum("mk,nk->mn", x, weight, precision=jax.lax.Precision.HIGHEST) + bias
