"""The SwiGLU feed-forward network with, optionally, a mask over channel groups."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wide_jax.config import ModelConfig
from wide_jax.layers import Linear
from wide_jax.partition import constrain
from wide_jax.routing import GroupMask


class MLP(nnx.Module):
    """`W_down (silu(x W_gate) * (x W_up))` (arXiv 2002.05202), masked before `W_down`."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: GroupMask | None) -> Float[Array, "B T D"]:
        """`x` is already normed; a bias of `down_proj` is added whatever the mask."""
        inner = constrain(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x), "inner_BTF")
        if mask is not None:
            channels = jnp.repeat(mask, inner.shape[-1] // mask.shape[-1], axis=-1)
            inner = inner * channels.astype(inner.dtype)
        return self.down_proj(inner)
