"""Token batches: ids with positions and segments, the one form every forward pass takes."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens. Segment 0 is padding; tokens see only earlier ones of their own segment."""

    input_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]

    @property
    def real(self) -> Bool[Array, "B T"]:
        """True where a token counts (is not padding)."""
        return self.segment_ids > 0

    @classmethod
    def from_lengths(
        cls, input_ids: Int[Array, "B T"], lengths: Int[Array, "B"] | None = None
    ) -> "TokenBatch":
        """One segment a row, from position 0, padded on the right (`lengths=None`: no padding)."""
        columns = jnp.broadcast_to(jnp.arange(input_ids.shape[1], dtype=jnp.int32), input_ids.shape)
        real = columns >= 0 if lengths is None else columns < lengths[:, None]
        return cls(input_ids, columns, real.astype(jnp.int32))


def left_aligned(
    input_ids: Int[Array, "B T"], attention_mask: Bool[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Move every row's real tokens to its start, in order; returns the ids and their counts.

    So padding on either side, or of any id, means the same afterwards: the padded end is never
    read, and a token's position is its index.
    """
    order = jnp.argsort(~attention_mask, axis=1, stable=True)
    lengths = attention_mask.sum(axis=1, dtype=jnp.int32)
    ids = jnp.take_along_axis(input_ids, order, axis=1)
    inside = jnp.arange(ids.shape[1]) < lengths[:, None]
    return jnp.where(inside, ids, 0), lengths
