"""The small parts every sublayer uses: linear map, RMS norm, rotary embedding."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wide_jax.config import RopeConfig
from wide_jax.params import BaseParam
from wide_jax.rope import attention_scaling, inverse_frequencies


class Linear(nnx.Module):
    """`y = x W^T + b` with the weight as Hugging Face stores it, `[out, in]`.

    A new weight is drawn from a normal of standard deviation 0.02 (Hugging Face's
    `initializer_range`); a bias starts at zero. `wide_jax.lora` may attach low-rank factors.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.weight = BaseParam(
            0.02 * jax.random.normal(rngs.params(), (out_features, in_features), dtype)
        )
        self.bias = BaseParam(jnp.zeros((out_features,), dtype)) if bias else None
        self.lora: nnx.Module | None = nnx.data(None)  # a `wide_jax.lora.LoRAFactors`, if attached

    def __call__(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        y = jnp.einsum("...k,nk->...n", x, self.weight[...])
        if self.lora is not None:
            y = y + self.lora(x)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        self.weight = BaseParam(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        # The weight multiplies after the cast back, as Hugging Face does: bf16 rounds the same way.
        return self.weight[...] * (x32 * scale).astype(x.dtype)


class Embedding(nnx.Module):
    """Token embedding; also the output head of a model that ties the two."""

    def __init__(self, vocab_size: int, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = BaseParam(0.02 * jax.random.normal(rngs.params(), (vocab_size, size), dtype))

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return self.weight[...][ids]

    def attend(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits of every token of the vocabulary: `x E^T`."""
        return jnp.einsum("...d,vd->...v", x, self.weight[...])


def rotary_angles(
    positions: Int[Array, "B T"], rope: RopeConfig, head_dim: int, max_length: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of every position's angles, float32 (bf16 cannot tell long positions apart).

    `max_length` is the longest sequence of the call; only RoPE types whose frequencies depend on
    the length (`dynamic`) use it.
    """
    frequencies = inverse_frequencies(rope, head_dim, sequence_length=max_length)
    angles = positions[..., None].astype(jnp.float32) * np.asarray(frequencies, np.float32)
    scaling = attention_scaling(rope)
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def rotate(
    x: Float[Array, "B T H d"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
) -> Float[Array, "B T H d"]:
    """Turn each head's pairs (i, i + d/2) by their angles: the rotate-half layout of Hugging Face.

    With a partial rotary factor the angles cover fewer than d/2 pairs; the rest passes unchanged.
    """
    rotary = 2 * cos.shape[-1]
    first, second, rest = jnp.split(x, [rotary // 2, rotary], axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in (*turned, rest)], axis=-1)
