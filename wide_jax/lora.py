"""LoRA on a model in memory: low-rank factors beside frozen weights, trained in stage 2.

A linear map with LoRA computes `y = x W^T + scale * dropout(x) A^T B^T` (arXiv 2106.09685) with `A`
`[r, in]`, `B` `[out, r]`, `scale` alpha / r, or alpha / sqrt(r) with rank stabilisation
(arXiv 2312.03732). Factors are float32 whatever the model's dtype: in bf16 a step of 1e-5 on an
entry of 0.02 would vanish. The file format and merging into files are `wide_jax.hf.peft`'s.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt32

from wide_jax.hf.peft import LoRA
from wide_jax.model import WideForCausalLM
from wide_jax.params import DropoutKey, LoRAParam

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """Sizes of a LoRA. The defaults are the method's."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.1
    """Probability (0 to below 1) that an input element of the factors is zeroed in training."""
    rank_stabilised: bool = False
    targets: tuple[str, ...] = TARGETS
    """Names of the linear maps that get factors, in every layer."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA rank={self.rank} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA dropout={self.dropout} must be in [0, 1)")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"LoRA alpha={self.alpha} must be positive and finite")
        unknown = sorted(set(self.targets) - set(TARGETS))
        if unknown or not self.targets:
            raise ValueError(f"LoRA targets={self.targets} must be some of {TARGETS}")

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


class LoRAFactors(nnx.Module):
    """The factors of one linear map. `A` starts random, `B` at zero: a new LoRA changes nothing."""

    def __init__(
        self, in_features: int, out_features: int, settings: LoRASettings, *, rngs: nnx.Rngs
    ):
        bound = in_features**-0.5  # PEFT's: kaiming_uniform with a = sqrt(5)
        shape = (settings.rank, in_features)
        self.lora_A = LoRAParam(
            jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
        )
        self.lora_B = LoRAParam(jnp.zeros((out_features, settings.rank), jnp.float32))
        self.scale = settings.scale
        self.dropout = settings.dropout
        # Set while training (`with_dropout`); without a key nothing is dropped.
        self.key: DropoutKey | None = nnx.data(None)

    def __call__(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        if self.key is not None and self.dropout > 0:
            kept = keep_mask(self.key[...], self.dropout, x.shape)
            x = jnp.where(kept, x / (1.0 - self.dropout), jnp.zeros((), x.dtype))
        small = jnp.einsum("...k,rk->...r", x, self.lora_A[...].astype(x.dtype))
        return jnp.einsum("...r,nr->...n", small, (self.scale * self.lora_B[...]).astype(x.dtype))


def keep_mask(key: jax.Array, dropout: float, shape: tuple[int, ...]) -> Bool[Array, "*shape"]:
    """True with probability 1 - `dropout`, to 2^-32, for every element by its index alone.

    Counters mixed by integer hashes (Weyl steps through the finaliser of MurmurHash3, keyed twice)
    instead of `jax.random`'s Threefry: a dropout mask needs no cryptography, and compilers draw
    these again in the backward pass where they store Threefry's (8B shapes, 4 layers, H200: a step
    of 91.5 ms and 7.8 GiB, not 94.3 ms and 8.9). Like Threefry's, the mask does not depend on how
    the array is split over devices.
    """
    first, second = jax.random.key_data(key)[-2:]
    *leading, columns = shape
    row = jnp.arange(math.prod(leading), dtype=jnp.uint32).reshape(*leading, 1)
    row = _mixed(_mixed(row ^ first) + second)
    bits = _mixed(row + jnp.arange(columns, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    return bits >= jnp.uint32(round(dropout * 2**32))


def _mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32-bit words in which every input bit turns about half of the output's."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def attach(model: WideForCausalLM, settings: LoRASettings, *, rngs: nnx.Rngs) -> None:
    """Give every target of every layer new factors, in place.

    Raises:
        ValueError: the model has a LoRA already.
    """
    if factors_of(model):
        raise ValueError("the model has a LoRA already: merge it or load the model without it")
    for _, linear in _targets(model, settings.targets):
        out_features, in_features = linear.weight.shape
        linear.lora = LoRAFactors(in_features, out_features, settings, rngs=rngs)


def attach_adapter(model: WideForCausalLM, adapter: LoRA) -> LoRASettings:
    """Attach an adapter's own factors, in place: the LoRA stays apart from the weights.

    Raises:
        CheckpointError: factors that do not fit the model.
        ValueError: the model has a LoRA already, or the adapter leaves out layers of a target.
    """
    adapter.check(model.config)
    settings = LoRASettings(
        rank=adapter.rank,
        alpha=adapter.alpha,
        dropout=adapter.dropout,
        rank_stabilised=adapter.rank_stabilised,
        targets=tuple(sorted({name.rsplit(".", 1)[-1] for name in adapter.factors})),
    )
    attach(model, settings, rngs=nnx.Rngs(0))
    factors = factors_of(model)
    missing = sorted(set(factors) - set(adapter.factors))
    if missing:
        raise ValueError(f"the adapter has no factors for {missing}")
    for name, (a, b) in adapter.factors.items():
        factors[name].lora_A[...] = jnp.asarray(a, jnp.float32)
        factors[name].lora_B[...] = jnp.asarray(b, jnp.float32)
    return settings


def detach(model: WideForCausalLM) -> None:
    """Remove the factors, in place: the model is what it was before `attach`."""
    for _, linear in _targets(model, TARGETS):
        linear.lora = None


def with_dropout(model: WideForCausalLM, key: jax.Array | None) -> None:
    """Turn dropout on with one key for every map (the step folds in more), or off with None."""
    for number, factors in enumerate(factors_of(model).values()):
        factors.key = None if key is None else DropoutKey(jax.random.fold_in(key, number))


def factors_of(model: WideForCausalLM) -> dict[str, LoRAFactors]:
    """Module name (`model.layers.0.self_attn.q_proj`) to its factors, where there are any."""
    found = _targets(model, TARGETS)
    return {name: linear.lora for name, linear in found if linear.lora is not None}


def to_adapter(model: WideForCausalLM, settings: LoRASettings) -> LoRA:
    """The factors as `wide_jax.hf.peft` writes and merges them."""
    return LoRA(
        rank=settings.rank,
        alpha=settings.alpha,
        factors={
            name: (jax.device_get(f.lora_A[...]), jax.device_get(f.lora_B[...]))
            for name, f in factors_of(model).items()
        },
        dropout=settings.dropout,
        rank_stabilised=settings.rank_stabilised,
    )


def merge(model: WideForCausalLM) -> None:
    """Add every `scale * B A` to its weight, in place and in float32, and remove the factors.

    The weights keep their dtype. Rounding to bf16 loses small deltas, so a bf16 model is refused:
    load it in float32 first, or merge files with `wide_jax.hf.peft.merge`, which measures the loss.

    Raises:
        ValueError: a weight is not float32.
    """
    found = [(n, linear) for n, linear in _targets(model, TARGETS) if linear.lora is not None]
    for name, linear in found:
        if linear.weight.dtype != jnp.float32:
            raise ValueError(
                f"{name}: merging into {linear.weight.dtype} would round the LoRA away: load the "
                "model in float32, or keep the adapter apart"
            )
    for _, linear in found:
        delta = jnp.matmul(
            linear.lora.lora_B[...], linear.lora.lora_A[...], precision=jax.lax.Precision.HIGHEST
        )
        linear.weight[...] = linear.weight[...] + linear.lora.scale * delta
        linear.lora = None


def _targets(model: WideForCausalLM, targets: tuple[str, ...]):
    for number, layer in enumerate(model.model.layers):
        for block in ("self_attn", "mlp"):
            for name in TARGETS:
                linear = getattr(getattr(layer, block), name, None)
                if linear is not None and name in targets:
                    yield f"model.layers.{number}.{block}.{name}", linear
