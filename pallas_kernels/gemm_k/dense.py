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
    residual are added, and so is every sum.

    `mask` None: h already holds zeros where a group is skipped, and is used as it is.
    """
    if mask is not None:
        h = clear_skipped(h, mask, group_size)
    precision = jax.lax.Precision.HIGHEST if h.dtype == jnp.float32 else None
    y = jnp.einsum("mk,nk->mn", h, w, precision=precision)
    # In h's dtype: of float32 sums XLA keeps a float32 copy beside the rounded one for whoever adds
    # to them next, a layer's residual stream twice (216 us an addition of 16,384 x 4,096 on an
    # H200, where one of bfloat16 takes 93 to 120).
    for term in (bias, residual):
        if term is not None:
            y = y + term
    return y
