"""Random weights of a shape, to measure with where there is no checkpoint."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float, Key

DEVIATION = 0.02


def random_weight(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    key: Key[Array, ""],
    *,
    sharding: Sharding | None = None,
) -> Float[Array, "*shape"]:
    """The weight of this Hugging Face name: the same values wherever it lies.

    Norms are one, a LoRA's second factor zero (it changes nothing), everything else, biases too, is
    normal with deviation 0.02, drawn in bfloat16.

    Args:
        name: decides between these.
        shape: its shape.
        dtype: its type.
        key: of its own, for every weight.
        sharding: where it lies; None: on the default device.
    """
    fill = None
    if name.endswith("norm.weight"):
        fill = 1.0
    elif name.endswith(".lora_B"):
        fill = 0.0
    return _drawer(sharding)(key, shape, jnp.dtype(dtype), fill)


@functools.cache
def _drawer(sharding: Sharding | None):
    return jax.jit(_value, static_argnums=(1, 2, 3), out_shardings=sharding)


def _value(key, shape, dtype, fill):
    if fill is not None:
        return jnp.full(shape, fill, dtype)
    return (DEVIATION * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)
