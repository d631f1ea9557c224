"""One decoder layer through `pallas_kernels`: what inference runs where a model has `Kernels`.

    x -> norm_route -> mask -> mask_layout          one decision, one layout a sublayer
         project_qkv -> rope_cache -> attention -> gemm_k (o) -> + x
    x -> norm_route -> mask -> mask_layout
         swiglu_up (gate, up) -> gemm_k (down) -> + x

A step of one token makes its keys and values beside the first decision: `route_kv` in place of
`norm_route`, then `gemm_mn` in place of `project_qkv`. One token a row is rotated, written to the
cache and attends in one operation, `attention_step`. A prompt's queries are left to the attention
that reads them, which may turn only the active ones; `rope_cache` does its keys. The plain path
(`attention.py`, `mlp.py`) is the specification. Padding tokens skip every group here: nobody reads
their outputs.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import (
    MaskLayout,
    RouterWeights,
    gemm_k,
    gemm_mn,
    mask_layout,
    norm_route_step,
    rms_norm,
    route_kv,
    swiglu_up,
)
from pallas_kernels.attention_decode import attention_decode
from pallas_kernels.attention_prefill import attention_prefill
from pallas_kernels.attention_step import attention_step
from pallas_kernels.dispatch import SMALL_TOKENS
from pallas_kernels.project_qkv import Biases, project_qkv, unmerged
from pallas_kernels.rope_cache import Rotation, rope_cache
from wide_jax.attention import Attention, AttentionInputs
from wide_jax.cache import LayerCache
from wide_jax.config import ModelConfig
from wide_jax.kernels import Kernels
from wide_jax.layers import Linear, RMSNorm, rotate
from wide_jax.mlp import MLP
from wide_jax.router import Router, required
from wide_jax.routing import AllOn, Argmax, Forced, Module, Routing

FEW_TOKENS = SMALL_TOKENS  # up to here the ops read each weight once: even a dense step gains
DENSE_FFN_GROUP = 128


def dense_ffn_group(config: ModelConfig) -> int:
    """Channels of a group in a dense step of few tokens."""
    channels = config.intermediate_size
    return DENSE_FFN_GROUP if channels % DENSE_FFN_GROUP == 0 else channels


def dense_groups(config: ModelConfig) -> tuple[int, int]:
    """Attention and FFN groups that the kernels see in a dense step of few tokens."""
    return config.num_key_value_heads, config.intermediate_size // dense_ffn_group(config)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A sublayer's normed input and what runs of it."""

    normed: Float[Array, "B T D"]
    mask: Bool[Array, "B T groups"] | None  # None: everything
    layout: MaskLayout | None  # None: everything, by plain products
    counter: Int32[Array, " C"]  # the routing kernel's, for the next decision
    argmax: Bool[Array, "B T groups"] | None = None  # what the router says, where one was asked
    # Keys and values, where the routing kernel made them too.
    kv: tuple[Float[Array, "M Nk"], Float[Array, "M Nk"]] | None = None


def decision(
    norm: RMSNorm,
    router: Router | None,
    x: Float[Array, "B T D"],
    shared: AttentionInputs,
    routing: Routing,
    kernels: Kernels,
    *,
    layer: int,
    module: Module,
    groups: int,
    counter: Int32[Array, " C"],
    attention: Attention | None = None,
    decided: Decision | None = None,
) -> Decision:
    """Norm, mask and layout of one sublayer, whose input is the residual stream `x`.

    `groups` are those of a dense step of few tokens, which runs by the same kernels. `counter` is
    `norm_route_step`'s. `attention`: what is decided about, if that is attention: where a step of
    one token asks a router, keys and values come with the decision. `decided`: another sublayer's
    decision that holds for this one too.

    Raises:
        ValueError: `routing` needs a router and the model has none.
    """
    sparsity = getattr(kernels.hints, module)
    if decided is not None:
        normed = _normed(norm, x, kernels)
        return Decision(normed, decided.mask, decided.layout, counter, decided.argmax)
    match routing:
        case AllOn():
            layout = None
            if x.shape[0] * x.shape[1] <= FEW_TOKENS and not kernels.plain_products:
                layout = _layout(jnp.ones((*x.shape[:2], groups), bool), shared, 0.0, kernels)
            return Decision(_normed(norm, x, kernels), None, layout, counter)
        case Forced(masks, ask_routers):
            mask = getattr(masks, module)[layer]
            if mask.dtype != jnp.bool_:
                mask = mask != 0
            if not ask_routers:
                normed = _normed(norm, x, kernels)
                return Decision(normed, mask, _layout(mask, shared, sparsity, kernels), counter)
            asked = _asked(norm, required(router, routing), x, counter, kernels, attention)
            mask, argmax = jax.lax.optimization_barrier((mask, asked.mask))
        case Argmax():
            asked = _asked(norm, required(router, routing), x, counter, kernels, attention)
            mask = argmax = asked.mask
        case _:
            raise ValueError(
                f"{type(routing).__name__} routing is for training: it runs in plain JAX"
            )
    layout = _layout(mask, shared, sparsity, kernels)
    return Decision(asked.normed, mask, layout, asked.counter, argmax, asked.kv)


def _normed(norm: RMSNorm, x: Float[Array, "B T D"], kernels: Kernels) -> Float[Array, "B T D"]:
    """The normed input of a sublayer that asks no router."""
    rows = x.reshape(-1, x.shape[-1])
    weight = norm.weight[...]
    normed = rms_norm(rows, weight, eps=norm.eps, implementation=kernels.rms_norm)
    return normed.reshape(x.shape)


class _Asked(NamedTuple):
    """The normed input, the router's decisions, the counter, and keys and values if made."""

    normed: Float[Array, "B T D"]
    mask: Bool[Array, "B T groups"]
    counter: Int32[Array, " C"]
    kv: tuple[Float[Array, "M Nk"], Float[Array, "M Nk"]] | None


def _asked(
    norm: RMSNorm,
    router: Router,
    x: Float[Array, "B T D"],
    counter: Int32[Array, " C"],
    kernels: Kernels,
    attention: Attention | None,
) -> _Asked:
    compressor, last = router.compressor, router.router
    rows, norm_weight = x.reshape(-1, x.shape[-1]), norm.weight[...]
    weights = RouterWeights(
        compressor.weight[...], compressor.bias[...], last.weight[...], last.bias[...]
    )
    options = {"eps": norm.eps, "threshold": router.threshold}
    kv = None
    if attention is not None and rows.shape[0] == 1 and kernels.routes_with_kv:
        biases = _biases(attention)
        normed, mask, k, v, counter = route_kv(
            rows,
            norm_weight,
            weights,
            attention.k_proj.weight[...],
            attention.v_proj.weight[...],
            counter,
            biases=None if biases is None else biases[1:],
            implementation=kernels.route_kv,
            **options,
        )
        kv = k, v
    else:
        normed, mask, counter = norm_route_step(
            rows, norm_weight, weights, counter, implementation=kernels.norm_route, **options
        )
    return _Asked(normed.reshape(x.shape), mask.reshape(*x.shape[:2], -1), counter, kv)


def _layout(
    mask: Bool[Array, "B T groups"],
    shared: AttentionInputs,
    sparsity: float | None,
    kernels: Kernels,
) -> MaskLayout:
    if mask.shape[:2] != (1, 1):  # one token is real, or the step does not matter
        mask = mask & (shared.segment_ids > 0)[..., None]
    return mask_layout(
        mask.reshape(-1, mask.shape[-1]),
        expected_sparsity=sparsity,
        implementation=kernels.mask_layout,
    )


def attend(
    attention: Attention,
    x: Float[Array, "B T D"],
    decision: Decision,
    shared: AttentionInputs,
    cache: LayerCache | None,
    kernels: Kernels,
) -> tuple[Float[Array, "B T D"], LayerCache | None]:
    """`x` plus the attention sublayer's output, and the cache with the new keys and values."""
    rows, tokens = x.shape[:2]
    q, k, v = (
        y.reshape(rows, tokens, -1, attention.head_dim)
        for y in _projected(attention, decision, kernels)
    )
    if cache is not None and _decodes(shared, tokens):
        out, cache = _step(attention, q, k, v, decision, shared, cache, kernels)
    else:
        out, cache = _prompt(attention, q, k, v, decision, shared, cache, kernels)
    out = out.reshape(rows * tokens, -1)
    # Where everything runs, padding's heads are computed though its layout says off.
    zeroed = decision.mask is not None
    return _added(x, out, attention.o_proj, decision, kernels, zeroed=zeroed), cache


def _decodes(shared: AttentionInputs, tokens: int) -> bool:
    """Whether a forward pass with a cache is a step: one token a row, which sees what is cached."""
    return tokens == 1 and not shared.fresh


def _step(
    attention: Attention,
    q: Float[Array, "B 1 Hq d"],
    k: Float[Array, "B 1 Hk d"],
    v: Float[Array, "B 1 Hk d"],
    decision: Decision,
    shared: AttentionInputs,
    cache: LayerCache,
    kernels: Kernels,
) -> tuple[Float[Array, "B Hq d"], LayerCache]:
    """Attention of one new token a row, and the cache with it, in one operation or two.

    `attention_step` takes a cache of the projections' dtype only; where it is named it runs or
    raises.
    """
    layout = _masked(decision)
    mask = None if layout is None else layout.mask
    assert shared.start is not None  # with a cache there is one
    # A row without a new token reads nothing.
    lengths = jnp.where(shared.segment_ids[:, 0] > 0, shared.start + 1, 0)
    options = {
        "sliding_window": attention.window,
        "expected_sparsity": None if layout is None else layout.expected_sparsity,
    }
    named, same = kernels.attention_step is not None, cache.keys.dtype == k.dtype
    if kernels.attends_in_a_step and (named or same):
        k_norm = attention.k_norm
        out, keys, values = attention_step(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            cache.keys,
            cache.values,
            mask,
            lengths,
            _rotation(attention, shared),
            k_norm=None if k_norm is None else k_norm.weight[...],
            implementation=kernels.attention_step,
            **options,
        )
        return out, dataclasses.replace(cache, keys=keys, values=values)
    rotated, k, cache = _cached(attention, q, k, v, shared, cache, kernels)
    assert rotated is not None  # there were queries
    out = attention_decode(
        rotated[:, 0],
        cache.keys.astype(k.dtype),
        cache.values.astype(v.dtype),
        mask,
        lengths,
        implementation=kernels.attention_decode,
        **options,
    )
    return out, cache


def _prompt(
    attention: Attention,
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B T Hk d"],
    v: Float[Array, "B T Hk d"],
    decision: Decision,
    shared: AttentionInputs,
    cache: LayerCache | None,
    kernels: Kernels,
) -> tuple[Float[Array, "B T Hq d"], LayerCache | None]:
    """Attention of new tokens, and the cache with them; with one, attention turns the queries."""
    rotation = start = lengths = segment_ids = None
    new = (shared.segment_ids > 0).sum(axis=1, dtype=jnp.int32)
    if cache is None:
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = (rotate(x, shared.cos, shared.sin) for x in (q, k))
        segment_ids = shared.segment_ids if shared.causal is None else None
    else:
        rotation = _rotation(attention, shared)
        _, k, cache = _cached(attention, None, k, v, shared, cache, kernels)
        if shared.fresh:  # the cache held nothing: the new tokens see only each other
            lengths = new
        else:
            assert shared.start is not None  # with a cache there is one
            start, lengths = shared.start, shared.start + new
            k, v = cache.keys.astype(k.dtype), cache.values.astype(v.dtype)
    out = attention_prefill(
        q,
        k,
        v,
        _masked(decision),
        start=start,
        lengths=lengths,
        segment_ids=segment_ids,
        sliding_window=attention.window,
        rotation=rotation,
        implementation=kernels.attention_prefill,
    )
    return out, cache


def _masked(decision: Decision) -> MaskLayout | None:
    """The layout that attention skips by; None: everything runs, whatever the products take."""
    return None if decision.mask is None else decision.layout


def _rotation(attention: Attention, shared: AttentionInputs) -> Rotation:
    """How attention is to turn the queries; in a step the new keys too, by the same angles."""
    norm = attention.q_norm
    if norm is None:
        return Rotation(shared.cos, shared.sin)
    return Rotation(shared.cos, shared.sin, norm.weight[...], norm.eps)


def _cached(
    attention: Attention,
    q: Float[Array, "B T Hq d"] | None,
    k: Float[Array, "B T Hk d"],
    v: Float[Array, "B T Hk d"],
    shared: AttentionInputs,
    cache: LayerCache,
    kernels: Kernels,
) -> tuple[Float[Array, "B T Hq d"] | None, Float[Array, "B T Hk d"], LayerCache]:
    """Queries, if there are any, and keys normed and rotated, and the cache with the new tokens."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    q, k, keys, values = rope_cache(
        q,
        k,
        v,
        shared.cos,
        shared.sin,
        cache.keys,
        cache.values,
        shared.slots,
        q_norm=None if q is None or q_norm is None else q_norm.weight[...],
        k_norm=None if k_norm is None else k_norm.weight[...],
        eps=0.0 if k_norm is None else k_norm.eps,
        implementation=kernels.rope_cache,
    )
    return q, k, dataclasses.replace(cache, keys=keys, values=values)


def feed_forward(
    mlp: MLP, x: Float[Array, "B T D"], decision: Decision, kernels: Kernels
) -> Float[Array, "B T D"]:
    """`x` plus the FFN's output.

    Raises:
        NotImplementedError: a kernel is asked for by name and the FFN has biases.
    """
    normed, layout = decision.normed.reshape(-1, x.shape[-1]), decision.layout
    gate, up = mlp.gate_proj, mlp.up_proj
    zeroed = layout is not None and gate.bias is None
    if gate.bias is not None and kernels.swiglu_up == "triton":
        raise NotImplementedError(
            "swiglu_up='triton' has no biases and this model's FFN has: leave swiglu_up at None"
        )
    if layout is None or gate.bias is not None:  # the kernel has no biases
        inner = jax.nn.silu(gate(normed)) * up(normed)
    else:
        inner = swiglu_up(
            normed,
            gate.weight[...],
            up.weight[...],
            layout,
            implementation=kernels.swiglu_up,
        )
    return _added(x, inner, mlp.down_proj, decision, kernels, zeroed=zeroed)


def _projected(
    attention: Attention, decision: Decision, kernels: Kernels
) -> tuple[Float[Array, "M N"], Float[Array, "M Nk"], Float[Array, "M Nk"]]:
    """Queries of the active groups, keys and values."""
    normed = decision.normed.reshape(-1, decision.normed.shape[-1])
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    if decision.layout is None:
        q, k, v = (
            projection(x) for projection, x in zip(projections, unmerged(normed, 3), strict=True)
        )
        return q, k, v
    w_q, w_k, w_v = (projection.weight[...] for projection in projections)
    biases = _biases(attention)
    if decision.kv is None:
        return project_qkv(
            normed, w_q, w_k, w_v, decision.layout, biases=biases, implementation=kernels.gemm_mn
        )
    bias = None if biases is None else biases[0]
    q = gemm_mn(normed, w_q, decision.layout, bias=bias, implementation=kernels.gemm_mn)
    return q, *decision.kv


def _biases(attention: Attention) -> Biases | None:
    """Those of queries, keys and values: a checkpoint has all or none."""
    q, k, v = attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias
    return None if q is None or k is None or v is None else (q[...], k[...], v[...])


def whole_product(
    x: Float[Array, "*B D"], weight: Float[Array, "N D"], kernels: Kernels
) -> Float[Array, "*B N"]:
    """`x W^T` with nothing skipped, for a few tokens: the output head of a decode step."""
    rows = x.reshape(-1, x.shape[-1])
    layout = mask_layout(
        jnp.ones((rows.shape[0], 1), bool),
        expected_sparsity=0.0,
        implementation=kernels.mask_layout,
    )
    y = gemm_mn(rows, weight, layout, implementation=kernels.gemm_mn)
    return y.reshape(*x.shape[:-1], -1)


def _added(
    x: Float[Array, "B T D"],
    inner: Float[Array, "M K"],
    linear: Linear,
    decision: Decision,
    kernels: Kernels,
    *,
    zeroed: bool,
) -> Float[Array, "B T D"]:
    """`x + inner W^T + bias`, over active groups only; `zeroed`: `inner` is 0 in the others."""
    if decision.layout is None:
        return x + linear(inner).reshape(x.shape)
    return gemm_k(
        inner,
        linear.weight[...],
        decision.layout,
        bias=None if linear.bias is None else linear.bias[...],
        residual=x.reshape(-1, x.shape[-1]),
        inputs_zeroed=zeroed,
        implementation=kernels.gemm_k,
    ).reshape(x.shape)
