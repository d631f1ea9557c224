"""The specification of `swiglu_up`, and its CPU path."""

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
    """`h[m, f] = silu(x w_gate^T)[m, f] (x w_up^T)[m, f]` where f's group is active, else 0.

    Sums, silu and product are float32 at highest precision; the result has x's dtype.
    """
    dot = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    gate = jnp.einsum("md,fd->mf", x, w_gate, **dot)
    up = jnp.einsum("md,fd->mf", x, w_up, **dot)
    h = jax.nn.silu(gate) * up
    return jnp.where(expand(mask, w_gate.shape[0], group_size), h, 0.0).astype(x.dtype)
