"""The specification of the token order."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def order_tokens(
    mask: Bool[Array, "M groups"],
) -> tuple[Int32[Array, "groups M"], Int32[Array, " groups"]]:
    """`order[g]` = token ids sorted by "skipped", ties in token order; `count[g]` = active ones."""
    order = jnp.argsort(~mask.T, axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(mask, axis=0, dtype=jnp.int32)
