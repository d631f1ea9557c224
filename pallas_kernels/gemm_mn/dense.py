"""`gemm_mn` by XLA's dense product, then zeros where the mask is off."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._common.masking import clear_skipped


def gemm_mn(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    mask: Bool[Array, "M groups"],
    bias: Float[Array, " N"] | None,
    group_size: int,
) -> Float[Array, "M N"]:
    """See `reference.gemm_mn`; the product is rounded to x's dtype before the bias is added."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("mk,nk->mn", x, w, precision=precision)
    if bias is not None:
        y = y + bias
    return clear_skipped(y, mask, group_size)
