"""The specification of `gemm_k`, and its CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._common.masking import expand


def gemm_k(
    h: Float[Array, "M K"],
    w: Float[Array, "N K"],
    mask: Bool[Array, "M groups"],
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    group_size: int,
) -> Float[Array, "M N"]:
    """`y[m, n] = sum over k with mask[m, k // group_size] of h[m, k] w[n, k] + bias + residual`.

    Sums are float32 at highest precision; the result has h's dtype.
    """
    kept = jnp.where(expand(mask, h.shape[1], group_size), h, jnp.zeros((), h.dtype))
    y = jnp.einsum(
        "mk,nk->mn",
        kept,
        w,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return y.astype(h.dtype)
