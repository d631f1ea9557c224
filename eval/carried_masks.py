"""A trained model's decisions, carried over to another shape so that this can be timed with them.

Place j of n takes the decisions of source place floor((j + 0.5) N / n) of N: layers, attention
groups and FFN groups alike. Tokens stay consecutive tokens of the text, and a token's decisions in
different layers and groups stay those that were made together. What is not kept: a source group
that stands for several neighbours makes them decide as one, so masks are coarser than the group
size that is timed (`repeats` says how often), and where the repeats differ, a layer's rate shifts a
little towards the groups with more of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from eval.e2e_runs import Variant
from wide_jax.batch import TokenBatch
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.model import WideForCausalLM
from wide_jax.routing import MODULES, Argmax, Forced, Masks, Module
from wide_jax.structure import split

WINDOW = 2_048  # tokens that the source sees together, as perplexity is measured


@dataclasses.dataclass(frozen=True)
class SourceMasks:
    """What a trained model decides on N consecutive tokens of a text. True = active."""

    attention: tuple[Bool[np.ndarray, "N Ga"], ...]  # a layer each
    ffn: tuple[Bool[np.ndarray, "N Gf"], ...]
    fingerprint: str  # of the model
    window: int  # tokens it saw together
    text_tokens: int  # of the text; it was repeated where these are fewer than N

    def of(self, module: Module) -> tuple[np.ndarray, ...]:
        """The module's, layer by layer."""
        return self.attention if module == "attention" else self.ffn


def source_masks(
    model: WideForCausalLM, ids: Sequence[int] | np.ndarray, tokens: int, *, fingerprint: str
) -> SourceMasks:
    """The routers' decisions on the first `tokens` tokens of a text, read window by window.

    Args:
        model: with routers; it runs on the kernels that it has.
        ids: of the text, repeated where it is shorter.
        tokens: decisions wanted, at least 1.
        fingerprint: of the model, for records.

    Raises:
        ValueError: no routers, or no text.
    """
    if model.wide is None:
        raise ValueError("the model has no routers: there are no masks to take from it")
    if len(ids) == 0:
        raise ValueError("no token ids: masks are taken on a text")
    window = min(WINDOW, model.config.max_position_embeddings, tokens)
    graphdef, state = split(model)

    @jax.jit
    def decide(state: nnx.State, ids: Int[Array, "1 T"]) -> tuple[tuple[Array, ...], ...]:
        masks = nnx.merge(graphdef, state)(TokenBatch.from_lengths(ids), Argmax()).masks
        return masks.attention, masks.ffn

    text = np.resize(np.asarray(ids, np.int32), (-(-tokens // window), 1, window))
    found = [jax.device_get(decide(state, jnp.asarray(row))) for row in text]

    attention, ffn = (
        tuple(np.concatenate(layer, axis=1)[0, :tokens] > 0 for layer in zip(*module, strict=True))
        for module in zip(*found, strict=True)
    )
    return SourceMasks(attention, ffn, fingerprint, window, len(ids))


def places(count: int, sources: int) -> Int[np.ndarray, "count"]:
    """The source of each of `count` places: floor((j + 0.5) sources / count)."""
    return (2 * np.arange(count) + 1) * sources // (2 * count)


def carried(
    source: SourceMasks, config: ModelConfig, wide: WideConfig, positions: Int[np.ndarray, "B T"]
) -> Masks:
    """The source's decisions on these tokens of its text, in the layers and groups of a shape."""
    layers = places(config.num_hidden_layers, len(source.attention))

    def module(masks: Sequence[np.ndarray], groups: int) -> tuple[Array, ...]:
        taken = places(groups, masks[0].shape[1])
        return tuple(jnp.asarray(masks[layer][positions][..., taken]) for layer in layers)

    return Masks(
        module(source.attention, wide.attn_groups(config)),
        module(source.ffn, wide.ffn_groups(config)),
    )


def shuffled(masks: Masks, seed: int) -> Masks:
    """As many skipped pairs in every layer and module, at random tokens and groups."""

    @jax.jit
    def shuffle(key: Array, mask: Bool[Array, "B T groups"]) -> Bool[Array, "B T groups"]:
        return jax.random.permutation(key, mask.reshape(-1)).reshape(mask.shape)

    keys = jax.random.split(jax.random.key(seed), (len(MODULES), len(masks.ffn)))
    return Masks(
        *(
            tuple(shuffle(key, mask) for key, mask in zip(own, getattr(masks, module), strict=True))
            for own, module in zip(keys, MODULES, strict=True)
        )
    )


def skipped(masks: Masks, axis: int | tuple[int, ...] | None = None) -> Any:
    """Shares of both modules that are skipped, the mean over layers: `[2, ...]`."""
    return np.stack(
        [
            np.mean([1.0 - np.asarray(m).mean(axis=axis) for m in getattr(masks, module)], axis=0)
            for module in MODULES
        ]
    )


def typical_step(prompt: Masks, following: Masks) -> int:
    """Which of the tokens after the prompts (columns `[B, C]`) skips most nearly what they do.

    By the squared distance of both modules' rates, over all rows of the column.
    """
    distance = skipped(following, axis=(0, 2)) - skipped(prompt)[:, None]
    return int(np.argmin((distance**2).sum(axis=0)))


def agreement(masks: Masks) -> dict[str, dict[Module, float | None]]:
    """How clustered masks are: the share of decisions equal to the token's, the group's before.

    Independent decisions of a rate p agree in p^2 + (1 - p)^2 of all cases. None where there is
    only one token, or one group.
    """

    def mean(module: Module, axis: int) -> float | None:
        layers = [np.asarray(mask) for mask in getattr(masks, module)]
        if layers[0].shape[axis] < 2:
            return None
        return float(np.mean([1.0 - np.diff(mask, axis=axis).mean() for mask in layers]))

    return {
        name: {module: mean(module, axis) for module in MODULES}
        for name, axis in (("tokens", 1), ("groups", 2))
    }


def describe(source: SourceMasks, config: ModelConfig, wide: WideConfig) -> dict[str, Any]:
    """Where carried masks come from and how coarse they are, for records."""
    layers = len(source.attention)
    counts = {
        "layers": (layers, config.num_hidden_layers),
        "attention": (source.attention[0].shape[1], wide.attn_groups(config)),
        "ffn": (source.ffn[0].shape[1], wide.ffn_groups(config)),
    }
    repeats = {
        name: np.bincount(places(target, own), minlength=own)
        for name, (own, target) in counts.items()
    }
    return {
        "fingerprint": source.fingerprint,
        "window": source.window,
        "text_tokens": source.text_tokens,
        "places": {name: own for name, (own, _) in counts.items()},
        "repeats": {name: [int(n.min()), int(n.max())] for name, n in repeats.items()},
    }


def described(about: dict[str, Any], config: ModelConfig, wide: WideConfig) -> str:
    """`describe` for people."""
    targets = {
        "layers": config.num_hidden_layers,
        "attention": wide.attn_groups(config),
        "ffn": wide.ffn_groups(config),
    }
    parts = []
    for name, own in about["places"].items():
        low, high = about["repeats"][name]
        times = f"{low}" if low == high else f"{low} to {high}"
        what = name if name == "layers" else f"{name} groups"
        parts.append(f"{own} {what} for {targets[name]} (each {times}x)")
    return (
        f"masks of {about['fingerprint'][:19]}, G={wide.ffn_group_size}: {', '.join(parts)}; "
        "a group that stands for several makes them decide as one"
    )


def carried_variants(
    source: SourceMasks,
    config: ModelConfig,
    wide: WideConfig,
    batch: int,
    tokens: int,
    steps: int,
) -> list[Variant]:
    """The shape with the source's masks, and with as many skipped at random in every layer.

    Rows are consecutive pieces of the text. A decode step has one token's masks a row: those of the
    one among the `steps` tokens after the prompt whose rates are nearest the prompt's.
    """
    ends = (np.arange(batch) + 1)[:, None] * tokens
    prompt = carried(source, config, wide, np.arange(batch * tokens).reshape(batch, tokens))
    following = carried(source, config, wide, ends + np.arange(steps))
    chosen = typical_step(prompt, following)
    step = carried(source, config, wide, ends + chosen)
    attention, ffn = (float(rate) for rate in skipped(prompt))
    kernels = Kernels(SparsityHints(attention, ffn))
    about = describe(source, config, wide) | {"step_token": chosen}
    pairs = {
        "trained_statistics": (prompt, step),
        "random_same_rates": (shuffled(prompt, seed=3), shuffled(step, seed=4)),
    }
    return [
        Variant(
            "wide",
            kernels,
            Forced(whole, ask_routers=True),
            Forced(one, ask_routers=True),
            None,
            name,
            about | {"agreement": agreement(whole)},
        )
        for name, (whole, one) in pairs.items()
    ]
