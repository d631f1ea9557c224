"""What masks save: skipped groups as fractions of parameters, FLOPs and bytes.

`usage` turns the masks of a forward pass into sums (a pytree: jitted, differentiable, addable);
`account` turns sums into the figures that every report prints. Prices, per layer and token that
sees `n` keys, itself included (`g` heads an attention group, `G` channels an FFN group):

| a skipped       | FLOPs             | weights | KV cache                                     |
|-----------------|-------------------|---------|----------------------------------------------|
| attention group | 4 D g d + 4 g d n | 2 D g d | 2 d n a KV head whose readers all skip it    |
| FFN group       | 6 D G             | 3 D G   | -                                            |

*Routable* is the sum over all groups. The *total* adds what no mask saves: K and V projections
(4 D Hk d FLOPs), routers, norms, the embedding row and the head (2 D V FLOPs). Bytes are those of
a one-sequence decode step at the token's `n`: every weight is read once, and the keys it sees.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from wide_jax.config import ModelConfig, WideConfig
from wide_jax.routing import GroupMask, Masks

ROUTER_BYTES = 4  # router weights are float32 whatever the model's dtype
NORM_FLOPS = 4  # per element: square, add to the sum, scale, weight

Sum = Float[Array, ""] | Float[np.ndarray, ""] | np.float64
LayerSums = Float[Array, "L"] | Float[np.ndarray, "L"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Usage:
    """Sums over real tokens, one entry a layer. Padding adds nothing.

    float32 on the device; `to_host` gives float64, which is what to add over many batches.
    """

    tokens: Sum
    keys: LayerSums  # sum of n: visible keys, itself included
    attention: LayerSums  # skipped (token, group) pairs
    attention_keys: LayerSums  # the same pairs, each weighted by its token's n
    ffn: LayerSums  # skipped (token, group) pairs
    kv_keys: LayerSums  # (token, KV head) pairs that no running group reads, weighted by n
    attn_groups: int = dataclasses.field(metadata={"static": True})  # Ga
    ffn_groups: int = dataclasses.field(metadata={"static": True})  # Gf

    def __add__(self, other: "Usage") -> "Usage":
        return jax.tree.map(operator.add, self, other)

    def to_host(self) -> "Usage":
        """The same sums as float64 on the host: sums of sums then lose nothing."""
        return jax.tree.map(lambda x: np.asarray(x, np.float64), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepUsage:
    """Batched decode: a column of the batch is one step, its weights are read once for all rows."""

    steps: Sum  # columns with at least one real token
    attention_idle: LayerSums  # (step, group) pairs that no real row needs
    ffn_idle: LayerSums

    @classmethod
    def of_one_row(cls, usage: Usage) -> "StepUsage":
        """Of a batch of one: what its token skips, a step need not read."""
        return cls(usage.tokens, usage.attention, usage.ffn)

    def __add__(self, other: "StepUsage") -> "StepUsage":
        return jax.tree.map(operator.add, self, other)

    def to_host(self) -> "StepUsage":
        """The same sums as float64 on the host."""
        return jax.tree.map(lambda x: np.asarray(x, np.float64), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fractions:
    """Saved over routable, 0 to 1 (0 where no token counted)."""

    attention: Sum  # of (token, attention group) pairs
    ffn: Sum  # of (token, FFN group) pairs
    paper: Sum  # the paper's measure: the unweighted mean of the two
    parameters: Sum
    flops: Sum
    bytes: Sum


@dataclasses.dataclass(frozen=True)
class Accounting:
    """What was skipped, as fractions (0 to 1) of the routable amount and of the total."""

    attention: float
    ffn: float
    paper: float
    parameters: float
    flops: float
    bytes: float
    parameters_total: float  # saved / everything a token touches, the head and routers included
    flops_total: float
    bytes_total: float
    attention_layers: tuple[float, ...]  # rate of each layer
    ffn_layers: tuple[float, ...]
    tokens: int
    mean_keys: float  # visible keys per token, over layers
    bytes_batched: float | None = None  # decode of the whole batch; None: not measured

    @classmethod
    def dense(cls, config: ModelConfig, tokens: int, mean_keys: float) -> "Accounting":
        """Nothing was skipped."""
        none = (0.0,) * config.num_hidden_layers
        return cls(*(0.0,) * 9, none, none, tokens, mean_keys)

    def line(self) -> str:
        """One line for people: what was skipped, in every measure."""
        batched = "" if self.bytes_batched is None else f", {self.bytes_batched:.1%} as a batch"
        return (
            f"skipped: attention {self.attention:.1%} | FFN {self.ffn:.1%} | "
            f"paper mean {self.paper:.1%} | parameters {self.parameters:.1%} | "
            f"FLOPs {self.flops:.1%} ({self.flops_total:.1%} of all) | "
            f"decode bytes {self.bytes:.1%} ({self.bytes_total:.1%} of all{batched}) | "
            f"{self.tokens:,} tokens, {self.mean_keys:.0f} keys each"
        )

    def summary(self) -> dict[str, float]:
        """The six figures of a result record."""
        names = ("attention", "ffn", "paper", "parameters", "flops", "bytes")
        return {name: getattr(self, name) for name in names}

    def by_layer(self) -> dict[str, list[float]]:
        """Skipped of each layer, by module."""
        return {"attention": list(self.attention_layers), "ffn": list(self.ffn_layers)}

    def to_json(self) -> dict[str, object]:
        """Every figure, as plain JSON types."""
        return dataclasses.asdict(self) | {
            "attention_layers": list(self.attention_layers),
            "ffn_layers": list(self.ffn_layers),
        }


def usage(
    masks: Masks,
    real: Bool[Array, "B T"],
    visible_keys: Num[Array, "B T"],
    config: ModelConfig,
) -> Usage:
    """Sum up what the masks skip.

    Jit-able; differentiable with straight-through float masks. A KV head's product over its
    readers is multilinear, so the gradient of a group is what flipping it alone would save.

    Args:
        masks: True or 1.0 = active.
        real: tokens that count.
        visible_keys: keys each token sees, itself included: `batch.positions + 1` without packing
            gaps. A layer's sliding window is applied here. A training budget may pass the
            constant of its stated context length.
        config: the architecture the masks belong to.

    Raises:
        ValueError: masks of another number of layers, or groups that do not divide the heads.
    """
    layers, (attn_groups, ffn_groups) = config.num_hidden_layers, _groups(masks, config)
    counts = real.astype(jnp.float32)
    keys = visible_keys.astype(jnp.float32)
    windows = [config.window_of_layer(layer) for layer in range(layers)]
    readers, reads = _kv_readers(config, attn_groups)
    attn_skip = [1.0 - mask.astype(jnp.float32) for mask in masks.attention]
    idle = [jnp.where(reads, skip[..., readers], 1.0).prod(axis=-1) for skip in attn_skip]
    # Stacked, and stored, before they are summed over tokens: else XLA merges every layer's sums
    # into one kernel whose compile time grows with the square of the layers (minutes for thirty).
    n = counts * jnp.stack([keys if w is None else jnp.minimum(keys, float(w)) for w in windows])
    attn_pairs = jnp.stack([skip.sum(axis=-1) for skip in attn_skip])
    ffn_pairs = jnp.stack([(1.0 - mask.astype(jnp.float32)).sum(axis=-1) for mask in masks.ffn])
    idle_heads = jnp.stack([heads.sum(axis=-1) for heads in idle])
    attn_pairs, ffn_pairs, idle_heads = jax.lax.optimization_barrier(
        (attn_pairs, ffn_pairs, idle_heads)
    )
    return Usage(
        counts.sum(),
        n.sum(axis=(1, 2)),
        _weighted(counts, attn_pairs),
        _weighted(n, attn_pairs),
        _weighted(counts, ffn_pairs),
        _weighted(n, idle_heads),
        attn_groups=attn_groups,
        ffn_groups=ffn_groups,
    )


def step_usage(masks: Masks, real: Bool[Array, "B T"]) -> StepUsage:
    """Groups that no row of a batched decode step needs; each column of the batch is one step."""

    def idle(mask: GroupMask) -> Array:
        needed = jnp.any((mask > 0) & real[..., None], axis=0)
        return (~needed & jnp.any(real, axis=0)[:, None]).sum(dtype=jnp.float32)

    return StepUsage(
        jnp.any(real, axis=0).sum(dtype=jnp.float32),
        jnp.stack([idle(mask) for mask in masks.attention]),
        jnp.stack([idle(mask) for mask in masks.ffn]),
    )


def fractions(
    usage: Usage, config: ModelConfig, *, weight_bytes: int | float, kv_bytes: int | float
) -> Fractions:
    """Saved over routable. Pure arithmetic: a training budget differentiates through it."""
    price = _Prices.of(config, usage.attn_groups, usage.ffn_groups)
    pairs = usage.tokens * float(config.num_hidden_layers)
    attention = _ratio(usage.attention.sum(), pairs * usage.attn_groups)
    ffn = _ratio(usage.ffn.sum(), pairs * usage.ffn_groups)
    saved, routable = _saved(usage, price), _routable(usage, price)
    return Fractions(
        attention=attention,
        ffn=ffn,
        paper=0.5 * (attention + ffn),
        parameters=_ratio(saved.weights, routable.weights),
        flops=_ratio(saved.flops, routable.flops),
        bytes=_ratio(saved.bytes(weight_bytes, kv_bytes), routable.bytes(weight_bytes, kv_bytes)),
    )


def account(
    usage: Usage,
    config: ModelConfig,
    wide: WideConfig,
    *,
    weight_bytes: int | float,
    kv_bytes: int | float,
    steps: StepUsage | None = None,
) -> Accounting:
    """The figures of a report.

    Args:
        usage: sums over the tokens reported on, best `to_host()`.
        config: the architecture.
        wide: group sizes and router rank the masks were made with.
        weight_bytes: size of a stored weight element (2 for bf16, 4 for float32).
        kv_bytes: size of a cached key or value element.
        steps: with it, `bytes_batched` tells what a batched decode step saves.

    Raises:
        ValueError: `usage` was summed over masks of other group sizes than `wide`'s.
    """
    expected = (wide.attn_groups(config), wide.ffn_groups(config))
    if (usage.attn_groups, usage.ffn_groups) != expected:
        raise ValueError(
            f"usage has {(usage.attn_groups, usage.ffn_groups)} (attention, FFN) groups a layer, "
            f"the WideConfig {expected}: account with the config the masks were made with"
        )
    usage = usage.to_host()
    price = _Prices.of(config, usage.attn_groups, usage.ffn_groups)
    part = fractions(usage, config, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    saved, routable = _saved(usage, price), _routable(usage, price)
    fixed = fixed_costs(config, wide)
    tokens, layers = float(usage.tokens), config.num_hidden_layers
    saved_bytes = saved.bytes(weight_bytes, kv_bytes)
    routable_bytes = routable.bytes(weight_bytes, kv_bytes)
    batched = None
    if steps is not None:
        steps = steps.to_host()
        idle = price.attn_weights * steps.attention_idle.sum()
        idle = idle + price.ffn_weights * steps.ffn_idle.sum()
        weights = steps.steps * layers * price.layer_weights
        batched = _ratio(
            weight_bytes * idle + kv_bytes * saved.kv,
            weight_bytes * weights + kv_bytes * routable.kv,
        )
    return Accounting(
        **{f.name: float(getattr(part, f.name)) for f in dataclasses.fields(part)},
        parameters_total=float(
            _ratio(
                saved.weights, routable.weights + tokens * (fixed.weights + fixed.router_weights)
            )
        ),
        flops_total=float(_ratio(saved.flops, routable.flops + tokens * fixed.flops)),
        bytes_total=float(_ratio(saved_bytes, routable_bytes + tokens * fixed.bytes(weight_bytes))),
        attention_layers=_rates(usage.attention, tokens * usage.attn_groups),
        ffn_layers=_rates(usage.ffn, tokens * usage.ffn_groups),
        tokens=round(tokens),
        mean_keys=float(_ratio(usage.keys.mean(), usage.tokens)),
        bytes_batched=None if batched is None else float(batched),
    )


def ideal_prefill_speedup(usage: Usage, config: ModelConfig, wide: WideConfig, rows: int) -> float:
    """How much faster a prefill of these masks would be if its time fell as its FLOPs do.

    `rows` sequences, whose last tokens alone go through the output head. Routing is charged to the
    pruned side only.
    """
    usage = usage.to_host()
    price = _Prices.of(config, usage.attn_groups, usage.ffn_groups)
    fixed, tokens = fixed_costs(config, wide), float(usage.tokens)
    head = 2.0 * config.hidden_size * config.vocab_size
    routers = 2.0 * _router_products(config, wide)
    dense = float(_routable(usage, price).flops) + rows * head
    dense += tokens * (fixed.flops - head - routers)
    return dense / (dense + tokens * routers - float(_saved(usage, price).flops))


def ideal_decode_speedup(
    usage: Usage,
    steps: StepUsage,
    config: ModelConfig,
    wide: WideConfig,
    *,
    weight_bytes: int | float,
    kv_bytes: int | float,
) -> float:
    """The same for decode steps and the bytes they read; a weight is read once for the batch."""
    usage, steps = usage.to_host(), steps.to_host()
    price = _Prices.of(config, usage.attn_groups, usage.ffn_groups)
    fixed = fixed_costs(config, wide)
    count = float(steps.steps)
    weights = config.num_hidden_layers * price.layer_weights + fixed.weights
    dense = count * weights * weight_bytes + float(_routable(usage, price).kv) * kv_bytes
    idle = price.attn_weights * steps.attention_idle.sum()
    idle += price.ffn_weights * steps.ffn_idle.sum()
    saved = float(idle) * weight_bytes + float(_saved(usage, price).kv) * kv_bytes
    return dense / (dense + count * fixed.router_weights * ROUTER_BYTES - saved)


@dataclasses.dataclass(frozen=True)
class FixedCosts:
    """What every token costs whatever its masks: FLOPs, and elements read in a decode step."""

    flops: float
    weights: float  # elements in the model's dtype: K/V projections, norms, biases, head, one row
    router_weights: float  # float32 elements

    def bytes(self, weight_bytes: int | float) -> float:
        """Bytes read by one decode step."""
        return self.weights * weight_bytes + self.router_weights * ROUTER_BYTES


def fixed_costs(config: ModelConfig, wide: WideConfig) -> FixedCosts:
    """K and V projections, routers, norms, embedding row and head, of one token."""
    hidden, layers, head = config.hidden_size, config.num_hidden_layers, config.head_dim
    queries = config.num_attention_heads * head
    keys = config.num_key_value_heads * head
    normed = (2 * layers + 1) * hidden
    if config.qk_norm:
        normed += layers * (queries + keys)
    biases = config.qkv_bias * (queries + 2 * keys) + config.o_bias * hidden
    biases += config.mlp_bias * (2 * config.intermediate_size + hidden)
    outputs = _router_outputs(config, wide)
    routers = _router_products(config, wide) // layers
    router_biases = sum(wide.router_rank + out for out in outputs)
    projections = layers * 2 * hidden * keys
    head_weights = hidden * config.vocab_size
    norm_weights = (2 * layers + 1) * hidden + (layers * 2 * head if config.qk_norm else 0)
    return FixedCosts(
        flops=float(2 * (projections + head_weights + layers * routers) + NORM_FLOPS * normed),
        weights=float(projections + head_weights + hidden + norm_weights + layers * biases),
        router_weights=float(layers * (routers + router_biases)),
    )


def _router_outputs(config: ModelConfig, wide: WideConfig) -> list[int]:
    """Logits of each router of a layer that is asked."""
    outputs = [2 * wide.attn_groups(config), 2 * wide.ffn_groups(config)]
    return outputs[:1] if wide.one_router else outputs  # the FFN's is kept in the file


def _router_products(config: ModelConfig, wide: WideConfig) -> int:
    """Multiplications of all routers for one token: their weights without biases."""
    outputs = _router_outputs(config, wide)
    rank = wide.router_rank
    return config.num_hidden_layers * sum(config.hidden_size * rank + rank * o for o in outputs)


@dataclasses.dataclass(frozen=True)
class _Prices:
    """Per skipped (token, group) pair: FLOPs and weight elements. Floats: no int32 to overflow."""

    attn_flops: float  # 4 D g d
    attn_key_flops: float  # 4 g d, per visible key
    attn_weights: float  # 2 D g d
    ffn_flops: float  # 6 D G
    ffn_weights: float  # 3 D G
    kv_elements: float  # 2 d, per visible key and KV head
    kv_heads: float

    attn_groups: int
    ffn_groups: int

    @classmethod
    def of(cls, config: ModelConfig, attn_groups: int, ffn_groups: int) -> "_Prices":
        rows = config.num_attention_heads // attn_groups * config.head_dim
        channels = config.intermediate_size // ffn_groups
        hidden = config.hidden_size
        return cls(
            attn_flops=float(4 * hidden * rows),
            attn_key_flops=float(4 * rows),
            attn_weights=float(2 * hidden * rows),
            ffn_flops=float(6 * hidden * channels),
            ffn_weights=float(3 * hidden * channels),
            kv_elements=float(2 * config.head_dim),
            kv_heads=float(config.num_key_value_heads),
            attn_groups=attn_groups,
            ffn_groups=ffn_groups,
        )

    @property
    def layer_weights(self) -> float:
        """Routable weight elements of one layer."""
        return self.attn_groups * self.attn_weights + self.ffn_groups * self.ffn_weights


@dataclasses.dataclass(frozen=True)
class _Amount:
    """FLOPs, weight elements and cached elements, summed over tokens and layers."""

    flops: Sum
    weights: Sum
    kv: Sum

    def bytes(self, weight_bytes: int | float, kv_bytes: int | float) -> Sum:
        return self.weights * weight_bytes + self.kv * kv_bytes


def _saved(usage: Usage, price: _Prices) -> _Amount:
    attention, ffn = usage.attention.sum(), usage.ffn.sum()
    return _Amount(
        flops=price.attn_flops * attention
        + price.attn_key_flops * usage.attention_keys.sum()
        + price.ffn_flops * ffn,
        weights=price.attn_weights * attention + price.ffn_weights * ffn,
        kv=price.kv_elements * usage.kv_keys.sum(),
    )


def _routable(usage: Usage, price: _Prices) -> _Amount:
    pairs = usage.tokens * float(usage.keys.shape[0])
    attention, ffn = pairs * float(price.attn_groups), pairs * float(price.ffn_groups)
    keys = usage.keys.sum()
    return _Amount(
        flops=price.attn_flops * attention
        + price.attn_key_flops * float(price.attn_groups) * keys
        + price.ffn_flops * ffn,
        weights=price.attn_weights * attention + price.ffn_weights * ffn,
        kv=price.kv_elements * price.kv_heads * keys,
    )


def _kv_readers(config: ModelConfig, attn_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups that read each KV head: indices `[Hk, most readers]`, and which of them are real.

    Any divisor of Hq is a group size, so a group may read several KV heads, and a KV head's
    queries may lie in several groups (Hq 12, Hk 2, groups of 4: both read the middle one).
    """
    queries = config.heads_per_kv_head
    group = config.num_attention_heads // attn_groups
    first = np.arange(config.num_key_value_heads) * queries // group
    last = ((np.arange(config.num_key_value_heads) + 1) * queries - 1) // group
    readers = first[:, None] + np.arange((last - first).max() + 1)
    reads = readers <= last[:, None]
    return np.where(reads, readers, 0), reads


def _groups(masks: Masks, config: ModelConfig) -> tuple[int, int]:
    """(Ga, Gf) of the masks, checked against the architecture."""
    layers = config.num_hidden_layers
    if len(masks.attention) != layers or len(masks.ffn) != layers:
        raise ValueError(
            f"masks of {len(masks.attention)} attention and {len(masks.ffn)} FFN layers for a "
            f"model of num_hidden_layers={layers}"
        )
    attn_groups, ffn_groups = masks.attention[0].shape[-1], masks.ffn[0].shape[-1]
    for name, groups, size in (
        ("num_attention_heads", attn_groups, config.num_attention_heads),
        ("intermediate_size", ffn_groups, config.intermediate_size),
    ):
        if size % groups:
            raise ValueError(f"masks of {groups} groups do not divide {name}={size}")
    return attn_groups, ffn_groups


def _weighted(weight: Float[Array, "*L B T"], value: Float[Array, "L B T"]) -> Float[Array, "L"]:
    """Sum of weight x value where the weight is not 0: padding may hold anything, NaN included."""
    return jnp.where(weight > 0, weight * value, 0.0).sum(axis=(1, 2))


def _ratio(part: Sum, whole: Sum) -> Sum:
    """part / whole, 0 where the whole is 0 (and then without a NaN in the gradient)."""
    xp = jnp if isinstance(whole, jax.Array) else np
    empty = whole == 0
    return xp.where(empty, 0.0, part / xp.where(empty, 1.0, whole))


def _rates(skipped: LayerSums, pairs: int | float) -> tuple[float, ...]:
    return tuple(float(x) / pairs if pairs else 0.0 for x in skipped)
