"""The key-value cache: a static buffer per layer whose slot number is the token's position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import step_counter
from wide_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys (rotated) and values of one layer; slots at and past a row's length are never read."""

    keys: Float[Array, "B S Hk d"]
    values: Float[Array, "B S Hk d"]
    counter: Int[Array, " C"]  # 0 between kernels: where the programs of a routing step meet

    def write(
        self,
        keys: Float[Array, "B T Hk d"],
        values: Float[Array, "B T Hk d"],
        slots: Int[Array, "B T"],
    ) -> "LayerCache":
        """Store new tokens at their slots; a slot outside the buffer (padding) stores nothing."""
        rows = jnp.arange(slots.shape[0])[:, None]
        return dataclasses.replace(
            self,
            keys=self.keys.at[rows, slots].set(keys.astype(self.keys.dtype), mode="drop"),
            values=self.values.at[rows, slots].set(values.astype(self.values.dtype), mode="drop"),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """All layers' caches and how many tokens each row holds."""

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        """Slots per row, S."""
        return self.layers[0].keys.shape[1]

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike) -> "KVCache":
        """A cache for `batch` rows of up to `capacity` tokens."""
        shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
        return _empty(config.num_hidden_layers, shape, jnp.dtype(dtype))

    def check_room(self, new_tokens: int) -> None:
        """Raise ValueError unless every row has slots for `new_tokens` more. Waits for the device.

        Compiled code cannot raise: a token past the capacity would be lost there without a word.
        """
        longest = int(self.lengths.max())
        if longest + new_tokens > self.capacity:
            raise ValueError(
                f"the cache has {self.capacity} slots a row and {longest} are filled: "
                f"{new_tokens} more do not fit; make one with capacity >= {longest + new_tokens}"
            )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(layers: int, shape: tuple[int, ...], dtype: jnp.dtype) -> KVCache:
    """One program: array by array, the host would take milliseconds."""
    made = [
        LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), step_counter())
        for _ in range(layers)
    ]
    return KVCache(tuple(made), jnp.zeros(shape[:1], jnp.int32))
