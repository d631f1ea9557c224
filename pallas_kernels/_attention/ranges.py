"""Which keys a query sees, as one range of slots per query.

Causality, lengths, left padding, packed segments and sliding windows all leave a query a single
run of slots, so every implementation takes two integers a query and knows no other kind of mask:

    slot     0  1  2  3  4  5  6  7
    segment  0  0  1  1  1  2  2  0          (0 is padding)
    query at slot 4 (segment 1)  sees [2, 4]
    query at slot 6 (segment 2)  sees [5, 6]
    query at slot 7 (padding)    sees [8, -1], nothing
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


def visible_ranges(
    tokens: int,
    slots: int,
    *,
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    first: Int[Array, " B"],
    segment_ids: Int[Array, "B S"] | None,
    sliding_window: int | None,
) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
    """The lowest and the highest slot that every query sees; (S, -1) where it sees none.

    Query t of row b sits at slot `start[b] + t` of `slots`; only slots in
    `[first[b], lengths[b])` hold tokens. A segment is a run of equal, non-zero ids.
    """
    position = start[:, None].astype(jnp.int32) + jnp.arange(tokens, dtype=jnp.int32)
    low = jnp.broadcast_to(first[:, None].astype(jnp.int32), position.shape)
    end = jnp.minimum(lengths, slots)[:, None]
    real = (position >= low) & (position < end) & (position >= 0)
    if segment_ids is not None:
        index = jnp.clip(position, 0, slots - 1)
        low = jnp.maximum(low, jnp.take_along_axis(_run_starts(segment_ids), index, axis=1))
        real &= jnp.take_along_axis(segment_ids, index, axis=1) != 0
    if sliding_window is not None:
        low = jnp.maximum(low, position - sliding_window + 1)
    low = jnp.maximum(low, 0)
    return jnp.where(real, low, slots), jnp.where(real, position, -1)


def _run_starts(segment_ids: Int[Array, "B S"]) -> Int32[Array, "B S"]:
    """The slot at which each slot's run of equal ids begins."""
    slot = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None, :]
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(begins, slot, 0), axis=1)
