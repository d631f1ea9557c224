"""The token order by prefix sums and one scatter, in plain XLA: linear, and runs anywhere."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def order_tokens(
    mask: Bool[Array, "M groups"],
) -> tuple[Int32[Array, "groups M"], Int32[Array, " groups"]]:
    """See `reference.order_tokens`. A token's slot is the number of tokens placed before it."""
    tokens, groups = mask.shape
    active = mask.T.astype(jnp.int32)
    before = jnp.cumsum(active, axis=1) - active  # active tokens before this one
    count = before[:, -1] + active[:, -1]
    token = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    slot = jnp.where(mask.T, before, count[:, None] + token - before)
    group = jnp.arange(groups)[:, None]
    order = jnp.zeros((groups, tokens), jnp.int32)
    order = order.at[group, slot].set(
        jnp.broadcast_to(token, slot.shape), unique_indices=True, mode="promise_in_bounds"
    )
    return order, count
