"""Self-attention with grouped-query heads and, optionally, a mask over head groups."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from wide_jax.cache import LayerCache
from wide_jax.config import ModelConfig
from wide_jax.layers import Linear, RMSNorm, rotate
from wide_jax.partition import constrain
from wide_jax.routing import GroupMask

# Who computes causal attention: `cudnn` is flash attention (NVIDIA GPUs, bf16 and fp16 only).
Causal = Literal["xla", "cudnn"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What every layer's attention shares in one forward pass."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    slots: Int[Array, "B T"]  # where each token's key goes in the cache; out of range: nowhere
    visible: Bool[Array, "B T S"]  # which keys each token sees
    visible_window: Bool[Array, "B T S"]  # the same in layers with a sliding window
    segment_ids: Int[Array, "B T"]  # of the new tokens; 0 is padding
    start: Int[Array, "B"] | None = None  # tokens that each row's cache held before these
    # Not None: rows are one segment padded on the right, so causal attention needs no mask.
    causal: Causal | None = dataclasses.field(default=None, metadata={"static": True})
    # The cache held nothing before these tokens.
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})


class Attention(nnx.Module):
    """Multi-head attention as in Llama, with Qwen2's biases and Qwen3's q/k norm where configured.

    Keys and values are computed for every token whatever the mask says.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        hidden = config.hidden_size
        self.head_dim = config.head_dim
        self.window = config.window_of_layer(layer)
        self.q_proj = Linear(hidden, q_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(hidden, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(hidden, kv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(q_size, hidden, bias=config.o_bias, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype)
        else:
            self.q_norm = self.k_norm = None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        shared: AttentionInputs,
        cache: LayerCache | None,
        mask: GroupMask | None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """`x` is already normed. Without a cache, tokens see only each other."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, shared.cos, shared.sin)
        k = rotate(k, shared.cos, shared.sin)
        if cache is not None:
            cache = cache.write(k, v, shared.slots)
            k, v = cache.keys.astype(k.dtype), cache.values.astype(v.dtype)
        out = self._attend(q, k, v, shared)
        if mask is not None:
            heads = jnp.repeat(mask, out.shape[2] // mask.shape[-1], axis=-1)[..., None]
            out = out * heads.astype(out.dtype)
        return self.o_proj(out.reshape(*out.shape[:2], -1)), cache

    def _attend(
        self,
        q: Float[Array, "B T Hq d"],
        k: Float[Array, "B S Hk d"],
        v: Float[Array, "B S Hk d"],
        shared: AttentionInputs,
    ) -> Float[Array, "B T Hq d"]:
        if shared.causal is None:
            visible = shared.visible if self.window is None else shared.visible_window
            return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None])
        window = None if self.window is None else (self.window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation=shared.causal
        )

    def _heads(self, x: Float[Array, "B T Hd"]) -> Float[Array, "B T H d"]:
        return constrain(x.reshape(*x.shape[:2], -1, self.head_dim), "heads_BTNd")
