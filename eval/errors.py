"""How far the pruned model is from the dense one, layer by layer (`wide eval errors`).

Per layer, over the real tokens of a text, and always against everything on:

- attention, FFN: the sublayer's output with its mask against the same sublayer's output without,
  for the same input (the pruned run's own residual stream): what this layer's mask does.
- stream: the pruned run's residual stream after the layer against the dense run's: what has
  accumulated so far.

The relative L2 error is sqrt(sum |pruned - dense|^2 / sum |dense|^2) over tokens; the cosine is
the mean over tokens, and that of a sublayer a token skips altogether is 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eval.perplexity import PerplexityConfig, cut
from eval.scoring import Ran, bucket, default_routing, full_precision
from eval.text import TokenizedText
from wide_jax.accounting import Accounting, LayerSums, Usage, usage
from wide_jax.batch import TokenBatch
from wide_jax.model import WideForCausalLM, attention_inputs
from wide_jax.routing import AllOn, Masks, Routing
from wide_jax.structure import split

PARTS = ("attention", "ffn", "stream")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sums:
    """Over real tokens, one entry a layer: squared differences, squared norms, cosines."""

    difference: LayerSums
    norm: LayerSums
    cosine: LayerSums


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """Relative L2 error and cosine similarity to dense, one value a layer."""

    error: Mapping[str, tuple[float, ...]]  # by part
    cosine: Mapping[str, tuple[float, ...]]
    tokens: int
    accounting: Accounting

    def to_json(self) -> dict[str, Any]:
        """Every figure, as plain JSON types; `layers` is what an `errors` record holds."""
        return {
            "tokens": self.tokens,
            "layers": {
                part: {"error": list(self.error[part]), "cosine": list(self.cosine[part])}
                for part in PARTS
            },
            "accounting": self.accounting.to_json(),
        }

    def line(self) -> str:
        """One line for people: each part's worst layer and the stream's last."""
        worst = []
        for part in PARTS[:2]:
            layer = int(np.argmax(self.error[part]))
            worst.append(f"{part} worst {self.error[part][layer]:.3f} (layer {layer})")
        stream = f"stream at the end {self.error['stream'][-1]:.3f}"
        return (
            f"relative L2 error to dense: {', '.join(worst)}, {stream}, "
            f"cosine {self.cosine['stream'][-1]:.3f}; {self.tokens:,} tokens"
        )


def layer_errors(
    model: WideForCausalLM,
    text: TokenizedText,
    config: PerplexityConfig,
    *,
    routing: Routing | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LayerErrors:
    """Compare the pruned run with the dense run of the same windows.

    Args:
        model: with routers for any routing that asks them.
        text: ids by `eval.text.tokenize`.
        config: windows, as for perplexity.
        routing: by default the routers' argmax.
        progress: called with windows done and in all.

    Raises:
        ValueError: a text without windows, or a model without routers for a routing that needs
            them.
    """
    routing = default_routing(model) if routing is None else routing
    windows = cut(text, config)
    if not windows:
        raise ValueError(f"no window to run: the text has {text.tokens} token(s)")
    graphdef, state = split(model)
    total: Mapping[str, _Sums] | None = None
    ran = Ran()
    for start in range(0, len(windows), config.batch_size):
        rows = windows[start : start + config.batch_size]
        lengths = np.zeros(config.batch_size, np.int32)
        lengths[: len(rows)] = [len(row.inputs) for row in rows]
        ids = np.zeros((config.batch_size, bucket(int(lengths.max()), config.window)), np.int32)
        for index, row in enumerate(rows):
            ids[index, : lengths[index]] = row.inputs
        with full_precision(model):
            sums, used = jax.device_get(_compare(graphdef, state, ids, lengths, routing))
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        real = lengths[: len(rows)]
        ran = ran + Ran.of(np.ones_like(real), real, None if used is None else used.to_host())
        if progress is not None:
            progress(start + len(rows), len(windows))
    assert total is not None  # there is at least one window
    return LayerErrors(
        error={part: _ratios(total[part].difference, total[part].norm) for part in PARTS},
        cosine={part: tuple((total[part].cosine / ran.tokens).tolist()) for part in PARTS},
        tokens=ran.tokens,
        accounting=ran.accounting(model),
    )


@functools.partial(jax.jit, static_argnames="graphdef")
def _compare(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    ids: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    routing: Routing,
) -> tuple[dict[str, _Sums], Usage | None]:
    """Sums of one batch: the layers as the model runs them, and each sublayer with its mask off."""
    model = nnx.merge(graphdef, state)
    batch = TokenBatch.from_lengths(ids, lengths)
    shared = attention_inputs(model.config, batch, None)
    pruned = dense = model.model.embed_tokens(ids)
    found: dict[str, list[tuple[Array, Array, Array]]] = {part: [] for part in PARTS}
    masks = []
    for layer in model.model.layers:
        after, decisions, _ = layer(pruned, shared, None, routing)
        normed = layer.input_layernorm(pruned)
        output, whole = (
            layer.self_attn(normed, shared, None, mask)[0] for mask in (decisions.attention, None)
        )
        found["attention"].append(_distance(output, whole, batch.real))
        normed = layer.post_attention_layernorm(pruned + output)
        output, whole = (layer.mlp(normed, mask) for mask in (decisions.ffn, None))
        found["ffn"].append(_distance(output, whole, batch.real))
        pruned = after
        dense, _, _ = layer(dense, shared, None, AllOn())
        found["stream"].append(_distance(pruned, dense, batch.real))
        masks.append((decisions.attention, decisions.ffn))
    sums = {
        part: _Sums(*(jnp.stack(values) for values in zip(*layers, strict=True)))
        for part, layers in found.items()
    }
    if masks[0][0] is None:
        return sums, None
    attention, ffn = zip(*masks, strict=True)
    used = usage(Masks(attention, ffn), batch.real, batch.positions + 1, model.config)
    return sums, used


def _distance(
    output: Float[Array, "B T D"], whole: Float[Array, "B T D"], real: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Sums over real tokens: squared difference, squared norm of `whole`, cosine."""
    output, whole = output.astype(jnp.float32), whole.astype(jnp.float32)
    norm = jnp.square(whole).sum(axis=-1)
    size = jnp.sqrt(norm * jnp.square(output).sum(axis=-1))
    cosine = jnp.where(size > 0, (output * whole).sum(axis=-1) / jnp.where(size > 0, size, 1), 0)
    difference = jnp.square(output - whole).sum(axis=-1)
    difference, norm, cosine = (jnp.where(real, x, 0.0).sum() for x in (difference, norm, cosine))
    return difference, norm, cosine


def _ratios(difference: LayerSums, norm: LayerSums) -> tuple[float, ...]:
    """sqrt(difference / norm); 0 where both are 0."""
    norm = np.asarray(norm)
    return tuple(np.sqrt(np.asarray(difference) / np.where(norm > 0, norm, 1.0)).tolist())


def plot_errors(errors: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw an `errors` record's `layers`: error and cosine over layers. Needs the `eval` extra."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "wide-jax"}):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        for part in PARTS:
            left.plot(errors[part]["error"], marker="o", markersize=3, label=part)
            right.plot(errors[part]["cosine"], marker="o", markersize=3, label=part)
        left.set(xlabel="layer", ylabel="relative L2 error to dense")
        right.set(xlabel="layer", ylabel="cosine similarity to dense")
        for axes in (left, right):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
        left.legend()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
