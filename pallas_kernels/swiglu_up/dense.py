"""`swiglu_up` by XLA's two dense products; SwiGLU and mask are one elementwise pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._common.masking import expand


def swiglu_up(
    x: Float[Array, "M D"],
    w_gate: Float[Array, "F D"],
    w_up: Float[Array, "F D"],
    mask: Bool[Array, "M groups"],
    group_size: int,
) -> Float[Array, "M F"]:
    """See `reference.swiglu_up`; gate and up are rounded to x's dtype before silu."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    gate = jnp.einsum("md,fd->mf", x, w_gate, precision=precision).astype(jnp.float32)
    up = jnp.einsum("md,fd->mf", x, w_up, precision=precision).astype(jnp.float32)
    h = jax.nn.silu(gate) * up
    return jnp.where(expand(mask, w_gate.shape[0], group_size), h, 0.0).astype(x.dtype)
