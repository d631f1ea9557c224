"""The model: a Llama-like decoder whose sublayers can skip groups, token by token."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from pallas_kernels import step_counter
from wide_jax import pruned
from wide_jax.attention import Attention, AttentionInputs, Causal
from wide_jax.batch import TokenBatch
from wide_jax.cache import KVCache, LayerCache
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.kernels import Kernels, without_gradient
from wide_jax.layers import Embedding, Linear, RMSNorm, rotary_angles
from wide_jax.mlp import MLP
from wide_jax.params import RouterParam
from wide_jax.partition import constrain
from wide_jax.router import Router, decide
from wide_jax.routing import (
    AttentionMask,
    FFNMask,
    Forced,
    GumbelSoftmax,
    Masks,
    Routing,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """What a forward pass returns; `masks` is None where everything ran without routers."""

    hidden: Float[Array, "B T D"]  # after the final norm: `WideForCausalLM.logits` takes it
    masks: Masks | None
    cache: KVCache | None
    # What argmax would have chosen from the same residual stream, where routers were asked:
    # training samples its masks, or others are given, and these are reported beside them.
    argmax: Masks | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerDecisions:
    """One layer's masks, and the argmax ones (None where no router was asked)."""

    attention: AttentionMask | None
    ffn: FFNMask | None
    attention_argmax: Bool[Array, "B T Ga"] | None
    ffn_argmax: Bool[Array, "B T Gf"] | None


class DecoderLayer(nnx.Module):
    """One decoder layer: attention and FFN, each with its norm, residual and (optional) router."""

    def __init__(
        self,
        config: ModelConfig,
        wide: WideConfig | None,
        layer: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        self.dense_attn_groups, self.dense_ffn_groups = pruned.dense_groups(config)
        self.one_router = wide is not None and wide.one_router
        self.input_layernorm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        if wide is None:
            self.router_attention = self.router_ffn = None
        else:
            rank = wide.router_rank
            self.router_attention = Router(
                hidden,
                rank,
                wide.attn_groups(config),
                threshold=wide.attention_threshold,
                rngs=rngs,
            )
            self.router_ffn = Router(
                hidden, rank, wide.ffn_groups(config), threshold=wide.ffn_threshold, rngs=rngs
            )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        shared: AttentionInputs,
        cache: LayerCache | None,
        routing: Routing,
        kernels: Kernels | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerDecisions, LayerCache | None]:
        if kernels is not None:
            return self._pruned(x, shared, cache, routing, kernels)
        attn_mask, attn_argmax = decide(
            self.router_attention, x, routing, layer=self.layer, module="attention"
        )
        attended, cache = self.self_attn(self.input_layernorm(x), shared, cache, attn_mask)
        x = constrain(x + attended, "hidden_BTD")
        if self.one_router and attn_argmax is not None:  # a router was asked: it decides for both
            ffn_mask, ffn_argmax = attn_mask, attn_argmax
            if isinstance(routing, Forced):
                ffn_mask = routing.masks.ffn[self.layer]
        else:
            ffn_mask, ffn_argmax = decide(
                self.router_ffn, x, routing, layer=self.layer, module="ffn"
            )
        x = constrain(x + self.mlp(self.post_attention_layernorm(x), ffn_mask), "hidden_BTD")
        return x, LayerDecisions(attn_mask, ffn_mask, attn_argmax, ffn_argmax), cache

    def _pruned(
        self,
        x: Float[Array, "B T D"],
        shared: AttentionInputs,
        cache: LayerCache | None,
        routing: Routing,
        kernels: Kernels,
    ) -> tuple[Float[Array, "B T D"], LayerDecisions, LayerCache | None]:
        """The same through the kernels: routing, norm and layout once a sublayer."""
        counter = step_counter() if cache is None else cache.counter
        attn = pruned.decision(
            self.input_layernorm,
            self.router_attention,
            x,
            shared,
            routing,
            kernels,
            layer=self.layer,
            module="attention",
            groups=self.dense_attn_groups,
            counter=counter,
            attention=self.self_attn,
        )
        x, cache = pruned.attend(self.self_attn, x, attn, shared, cache, kernels)
        one = self.one_router and attn.argmax is not None  # a router was asked: it decides for both
        decided = attn if one else None
        if one and isinstance(routing, Forced):
            routing, decided = Forced(routing.masks), None
        ffn = pruned.decision(
            self.post_attention_layernorm,
            self.router_ffn,
            x,
            shared,
            routing,
            kernels,
            layer=self.layer,
            module="ffn",
            groups=self.dense_ffn_groups,
            counter=attn.counter,
            decided=decided,
        )
        x = pruned.feed_forward(self.mlp, x, ffn, kernels)
        if cache is not None:
            cache = dataclasses.replace(cache, counter=ffn.counter)
        argmax = attn.argmax, attn.argmax if one else ffn.argmax
        return x, LayerDecisions(attn.mask, ffn.mask, *argmax), cache


class DecoderModel(nnx.Module):
    """Embedding, layers and final norm (Hugging Face's `model.` prefix)."""

    def __init__(
        self, config: ModelConfig, wide: WideConfig | None, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            DecoderLayer(config, wide, layer, dtype=dtype, rngs=rngs)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)


class WideForCausalLM(nnx.Module):
    """A causal language model with token-level dynamic width pruning.

    Args:
        config: the architecture.
        wide: group sizes and router rank; None builds the dense model, without routers.
        dtype: of weights and activations; routers are float32 always.
        rngs: for random initial weights. `wide_jax.load` fills in a checkpoint's instead.

    Raises:
        ValueError: group sizes that do not divide the model's heads or channels.
    """

    def __init__(
        self,
        config: ModelConfig,
        wide: WideConfig | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if wide is not None:
            wide.check(config)
        self.config, self.wide = config, wide
        self.kernels: Kernels | None = None  # see `wide_jax.engine.use_kernels`
        self.model = DecoderModel(config, wide, dtype=dtype, rngs=rngs)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        batch: TokenBatch,
        routing: Routing,
        *,
        cache: KVCache | None = None,
        remat: bool = False,
        causal: Causal | None = None,
        fresh: bool = False,
    ) -> ModelOutput:
        """Run the layers.

        Args:
            batch: the tokens. With a cache every row is one segment that continues the row's
                cached tokens: positions start at `cache.lengths`.
            routing: how groups are chosen.
            cache: keys and values of earlier tokens; the returned one holds these tokens too.
            remat: keep only each layer's input for the backward pass and recompute the rest.
            causal: promises that every row is one segment, padded on the right: attention then
                needs no `[T, S]` mask and runs by this implementation, or raises. Outputs of
                padding mean nothing either way.
            fresh: promises that the cache holds nothing yet, which lets kernels read the new keys
                and values alone.

        The caller sees to it that a cache has room: a token past its capacity would be lost.
        """
        kernels = None if isinstance(routing, GumbelSoftmax) or remat else self.kernels
        decoder = self.model if kernels is None else _undifferentiable(self.model)
        shared = attention_inputs(self.config, batch, cache, fresh=fresh)
        if causal is not None:
            if cache is not None:
                raise ValueError(f"{causal=} attention is for whole rows: it takes no cache")
            shared = dataclasses.replace(shared, causal=causal)
        x = constrain(decoder.embed_tokens(batch.input_ids), "hidden_BTD")
        decisions, caches = [], []
        for index, layer in enumerate(decoder.layers):
            layer_cache = None if cache is None else cache.layers[index]
            run = _rematerialised(layer) if remat else functools.partial(layer, kernels=kernels)
            x, chosen, layer_cache = run(x, shared, layer_cache, routing)
            decisions.append(chosen)
            caches.append(layer_cache)
        if cache is not None:
            added = batch.real.sum(axis=1, dtype=jnp.int32)
            cache = KVCache(tuple(caches), cache.lengths + added)
        masks = argmax = None
        if decisions[0].attention is not None:
            masks = Masks(
                tuple(layer.attention for layer in decisions),
                tuple(layer.ffn for layer in decisions),
            )
        if decisions[0].attention_argmax is not None:
            argmax = Masks(
                tuple(layer.attention_argmax for layer in decisions),
                tuple(layer.ffn_argmax for layer in decisions),
            )
        return ModelOutput(decoder.norm(x), masks, cache, argmax)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, and so of activations and of cached keys and values."""
        return self.model.embed_tokens.weight[...].dtype

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Next-token logits of normed hidden states, in the model's dtype."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        few = math.prod(hidden.shape[:-1]) <= pruned.FEW_TOKENS
        if self.kernels is not None and few and not self.kernels.plain_products:
            hidden, weight = without_gradient((hidden, head.weight[...]))
            return pruned.whole_product(hidden, weight, self.kernels)
        return head.attend(hidden) if isinstance(head, Embedding) else head(hidden)


def _undifferentiable(decoder: DecoderModel) -> DecoderModel:
    """The same weights; a derivative by them raises an error that says what to do.

    Routers apart from the rest: where none is asked, they are then no arguments of the program.
    """
    graphdef, routers, rest = nnx.split(decoder, RouterParam, ...)
    return nnx.merge(graphdef, without_gradient(routers), without_gradient(rest))


def attention_inputs(
    config: ModelConfig, batch: TokenBatch, cache: KVCache | None, *, fresh: bool = False
) -> AttentionInputs:
    """Rotary angles, cache slots and visibility, worked out once for all layers."""
    length = batch.input_ids.shape[1] if cache is None else cache.capacity
    # A cache is often roomier than the sequence: how roomy must not turn `dynamic` RoPE.
    longest = length if cache is None else min(length, config.max_position_embeddings)
    cos, sin = rotary_angles(batch.positions, config.rope, config.head_dim, longest)
    slots = jnp.where(batch.real, batch.positions, length)
    visible = visible_keys(batch, cache, None)
    windowed = visible_keys(batch, cache, config.sliding_window)
    return AttentionInputs(
        cos,
        sin,
        slots,
        visible,
        windowed,
        segment_ids=batch.segment_ids,
        start=None if cache is None else cache.lengths,
        fresh=fresh and cache is not None,
    )


def visible_keys(
    batch: TokenBatch, cache: KVCache | None, window: int | None
) -> Bool[Array, "B T S"]:
    """Which keys each token sees: itself and earlier tokens of its segment, within the window."""
    position = batch.positions[:, :, None]
    if cache is None:
        key_position = batch.positions[:, None, :]
        same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
        allowed = same & batch.real[:, :, None]
    else:
        key_position = jnp.arange(cache.capacity, dtype=jnp.int32)[None, None, :]
        allowed = batch.real[:, :, None]
    visible = allowed & (key_position <= position)
    return visible if window is None else visible & (key_position > position - window)


def _rematerialised(layer: DecoderLayer):
    """The layer with its activations recomputed in the backward pass (noise is keyed: equal)."""
    graphdef, state = nnx.split(layer)

    def run(state, *inputs):
        return nnx.merge(graphdef, state)(*inputs)

    checkpointed = jax.checkpoint(run)
    return lambda *inputs: checkpointed(state, *inputs)
