"""The specification of `gemm_mn`, and its CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._common.masking import expand


def gemm_mn(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    mask: Bool[Array, "M groups"],
    bias: Float[Array, " N"] | None,
    group_size: int,
) -> Float[Array, "M N"]:
    """`y[m, n] = sum_k x[m, k] w[n, k] + bias[n]` where group `n // group_size` is active, else 0.

    Sums are float32 at highest precision; the result has x's dtype.
    """
    y = jnp.einsum(
        "mk,nk->mn", x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return jnp.where(expand(mask, w.shape[0], group_size), y, 0.0).astype(x.dtype)
