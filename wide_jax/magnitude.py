"""A baseline without routers: groups are cut by the size of what they add to the output.

The score of a group, for a token, is the sum over its channels c of |a_c| x ||W[:, c]||, where `a`
enters the sublayer's output projection `W`: an FFN group's activations and columns of `down_proj`,
a head group's attention outputs and columns of `o_proj`. A group runs where its score reaches its
layer's threshold; thresholds are quantiles of the scores on calibration text, layer after layer,
each on the stream that the layers before it have pruned.

A score is known only when all that the group would have computed is there, so this can save no
more than the group's part of the output projection (`savable_flops`). To skip a whole group, a
method has to guess its score from the sublayer's input; these masks are those of a perfect guess,
at a sparsity that is not saved here. Every layer cuts the same share: a method that shares the cut
out among layers, as trained routers do, may lose less.
"""

import contextlib
import functools
from collections.abc import Callable, Generator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from wide_jax.accounting import Accounting
from wide_jax.attention import AttentionInputs
from wide_jax.batch import TokenBatch
from wide_jax.cache import LayerCache
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.kernels import Kernels
from wide_jax.layers import Linear
from wide_jax.model import DecoderLayer, LayerDecisions, WideForCausalLM, attention_inputs
from wide_jax.router import Router
from wide_jax.routing import AllOn, Argmax, Routing

Choose = Callable[[Float[Array, "B T groups"]], Float[Array, ""]]  # a threshold from the scores
ThresholdPair = Float[Array, "2"] | Float[np.ndarray, "2"]


class Threshold(nnx.Variable):
    """A layer's thresholds, `[2]` float32: attention, FFN."""


class MagnitudeLayer(DecoderLayer):
    """A decoder layer made of another one's sublayers, whose groups run by their scores.

    `AllOn` runs it densely, `Argmax` by its thresholds; it takes no other routing and no kernels.
    """

    def __init__(
        self, layer: DecoderLayer, config: ModelConfig, wide: WideConfig, thresholds: ThresholdPair
    ):
        self.layer = layer.layer
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.router_attention: Router | None = None
        self.router_ffn: Router | None = None
        self.one_router = False
        self.attn_groups, self.ffn_groups = wide.attn_groups(config), wide.ffn_groups(config)
        self.thresholds = Threshold(jnp.asarray(thresholds, jnp.float32))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        shared: AttentionInputs,
        cache: LayerCache | None,
        routing: Routing,
        kernels: Kernels | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerDecisions, LayerCache | None]:
        if kernels is not None or not isinstance(routing, AllOn | Argmax):
            raise ValueError(
                "groups chosen by magnitude run in plain JAX, by AllOn or Argmax: not by "
                f"{type(routing).__name__} with kernels={kernels}"
            )
        if isinstance(routing, AllOn):
            return super().__call__(x, shared, cache, routing)
        thresholds = self.thresholds[...]
        x, attention, ffn, cache = self.cut(
            x, shared, cache, lambda scores: thresholds[0], lambda scores: thresholds[1]
        )
        return x, LayerDecisions(attention.mask, ffn.mask, attention.mask, ffn.mask), cache

    def cut(
        self,
        x: Float[Array, "B T D"],
        shared: AttentionInputs,
        cache: LayerCache | None,
        at_attention: Choose,
        at_ffn: Choose,
    ) -> tuple[Float[Array, "B T D"], "CutProjection", "CutProjection", LayerCache | None]:
        """The layer with thresholds chosen from each sublayer's scores, and what they cut."""
        attention = CutProjection(self.self_attn.o_proj, self.attn_groups, at_attention)
        with _in_place_of(self.self_attn, "o_proj", attention):
            attended, cache = self.self_attn(self.input_layernorm(x), shared, cache, None)
        x = x + attended
        ffn = CutProjection(self.mlp.down_proj, self.ffn_groups, at_ffn)
        with _in_place_of(self.mlp, "down_proj", ffn):
            x = x + self.mlp(self.post_attention_layernorm(x), None)
        return x, attention, ffn, cache


class CutProjection:
    """An output projection of the groups whose score reaches the threshold, for one call.

    After the call, `threshold` and `mask` say what was cut.
    """

    def __init__(self, projection: Linear, groups: int, choose: Choose):
        self.projection, self.groups, self.choose = projection, groups, choose

    def __call__(self, inner: Float[Array, "B T K"]) -> Float[Array, "B T D"]:
        """A bias is added whatever the mask."""
        scores = group_scores(inner, self.projection.weight[...], self.groups)
        self.threshold = self.choose(scores)
        self.mask = scores >= self.threshold
        channels = jnp.repeat(self.mask, inner.shape[-1] // self.groups, axis=-1)
        return self.projection(inner * channels.astype(inner.dtype))


def group_scores(
    inner: Float[Array, "B T K"], weight: Float[Array, "D K"], groups: int
) -> Float[Array, "B T groups"]:
    """Sum over each group's channels of |inner| x the norm of the weight's column, float32."""
    sizes = jnp.abs(inner.astype(jnp.float32))
    sizes = sizes * jnp.linalg.norm(weight.astype(jnp.float32), axis=0)
    return sizes.reshape(*inner.shape[:-1], groups, -1).sum(axis=-1)


def by_magnitude(
    model: WideForCausalLM, wide: WideConfig, thresholds: Float[np.ndarray, "L 2"] | None = None
) -> WideForCausalLM:
    """The model with every layer's groups cut by magnitude; it shares the given one's weights.

    Args:
        model: without LoRA; its routers, where it has any, are not part of the result.
        wide: group sizes.
        thresholds: attention's and the FFN's, a row a layer (`calibrate_thresholds`); None: 0,
            which runs every group.

    Raises:
        ValueError: group sizes that the model does not have, or thresholds for another depth.
    """
    wide.check(model.config)
    layers = model.config.num_hidden_layers
    if thresholds is None:
        thresholds = np.zeros((layers, 2), np.float32)
    if thresholds.shape != (layers, 2):
        raise ValueError(f"thresholds of shape {thresholds.shape}, expected {(layers, 2)}")
    result = nnx.merge(*nnx.split(model))
    result.model.layers = nnx.List[DecoderLayer](
        MagnitudeLayer(layer, model.config, wide, row)
        for layer, row in zip(model.model.layers, thresholds, strict=True)
    )
    result.wide, result.kernels = wide, None
    return result


def calibrate_thresholds(
    model: WideForCausalLM, ids: Int[np.ndarray, "B T"], target: float
) -> Float[np.ndarray, "L 2"]:
    """Thresholds at which every layer and module skips `target` of its pairs on these rows.

    Args:
        model: by `by_magnitude`.
        ids: rows without padding.
        target: fraction to skip, 0 to 1.

    Raises:
        ValueError: a target outside 0 to 1.
    """
    if not 0 <= target <= 1:
        raise ValueError(f"target={target} must lie between 0 and 1")
    graphdef, state = nnx.split(model)
    return np.asarray(_calibrate(graphdef, state, jnp.asarray(ids, jnp.int32), target))


@functools.partial(jax.jit, static_argnames="graphdef")
def _calibrate(
    graphdef: nnx.GraphDef, state: nnx.State, ids: Int[Array, "B T"], target: Float[Array, ""]
) -> Float[Array, "L 2"]:
    model = nnx.merge(graphdef, state)
    batch = TokenBatch.from_lengths(ids, jnp.full(ids.shape[0], ids.shape[1], jnp.int32))
    shared = attention_inputs(model.config, batch, None)
    x, found = model.model.embed_tokens(ids), []

    def quantile(scores: Float[Array, "B T groups"]) -> Float[Array, ""]:
        return jnp.quantile(scores, target)

    for layer in model.model.layers:
        assert isinstance(layer, MagnitudeLayer)  # by `by_magnitude`
        x, attention, ffn, _ = layer.cut(x, shared, None, quantile, quantile)
        found.append(jnp.stack([attention.threshold, ffn.threshold]))
    return jnp.stack(found)


def savable_flops(accounting: Accounting, config: ModelConfig) -> float:
    """FLOPs that masks chosen by magnitude can save, as a fraction of the routable ones.

    Only the output projections are left to do when the scores are known: 2 D g d of an attention
    group's 4 D g d + 4 g d n, 2 D G of an FFN group's 6 D G (`wide_jax.accounting`).
    """
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    saved = 2.0 * hidden * (accounting.attention * queries)
    saved += 2.0 * hidden * accounting.ffn * config.intermediate_size
    routable = 4.0 * queries * (hidden + accounting.mean_keys)
    routable += 6.0 * hidden * config.intermediate_size
    return saved / routable


@contextlib.contextmanager
def _in_place_of(sublayer: nnx.Module, name: str, projection: CutProjection) -> Generator[None]:
    own = getattr(sublayer, name)
    setattr(sublayer, name, projection)
    try:
        yield
    finally:
        setattr(sublayer, name, own)
