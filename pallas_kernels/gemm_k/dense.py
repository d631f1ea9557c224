"""`gemm_k` by XLA's dense product over all inputs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._common.masking import clear_skipped


def gemm_k(
    h: Float[Array, "M K"],
    w: Float[Array, "N K"],
    mask: Bool[Array, "M groups"] | None,
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    group_size: int,
) -> Float[Array, "M N"]:
    """See `reference.gemm_k`; the product is rounded to h's dtype before bias and
    residual are added.

    `mask` None: h already holds zeros where a group is skipped, and is used as it is.
    """
    if mask is not None:
        h = clear_skipped(h, mask, group_size)
    precision = jax.lax.Precision.HIGHEST if h.dtype == jnp.float32 else None
    y = jnp.einsum("mk,nk->mn", h, w, precision=precision)
    if bias is None and residual is None:
        return y
    total = y.astype(jnp.float32)
    for term in (bias, residual):
        if term is not None:
            total = total + term.astype(jnp.float32)
    return total.astype(h.dtype)
