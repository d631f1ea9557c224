"""`gemm_mn` by XLA's dense product, then zeros where the mask is off."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._common import triton_support
from pallas_kernels._common.device import current_device
from pallas_kernels.gemm_mn.reference import expand


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
    capability = current_device().capability
    if triton_support.interpreting.get() or (
        capability is not None and float(capability) >= 8.0 and triton_support.available()
    ):
        from pallas_kernels._common.triton_gemm import zero_skipped

        return zero_skipped(y, mask, group_size)
    return jnp.where(expand(mask, w.shape[0], group_size), y, jnp.zeros((), y.dtype))
