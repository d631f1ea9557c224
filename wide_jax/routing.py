"""Which groups run: the ways to decide (`Routing`), and the decisions (`Masks`).

A mask has one meaning everywhere: True (or 1.0) = active, run this group for this token.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

Module = Literal["attention", "ffn"]
MODULES: tuple[Module, ...] = ("attention", "ffn")

GroupMask = Bool[Array, "B T groups"] | Float[Array, "B T groups"]
AttentionMask = Bool[Array, "B T Ga"] | Float[Array, "B T Ga"]
FFNMask = Bool[Array, "B T Gf"] | Float[Array, "B T Gf"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masks:
    """The decisions of one forward pass, layer by layer: bool, or 0.0/1.0 with a gradient.

    `attention[i]` is layer i's `[B, T, Ga]`, `ffn[i]` its `[B, T, Gf]`.
    """

    attention: tuple[AttentionMask, ...]
    ffn: tuple[FFNMask, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllOn:
    """Run everything: the dense model. No router is evaluated."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Argmax:
    """Inference: run a group where its execute logit is at least its skip logit. No noise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GumbelSoftmax:
    """Training: hard Gumbel-softmax samples with the straight-through gradient.

    `key` is one update's (and micro-batch's) key; every layer and module folds in its own number.
    """

    key: Key[Array, ""]
    temperature: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forced:
    """Use the given masks instead of the routers'.

    `ask_routers`: compute the routers' decisions too and report them (`ModelOutput.argmax`): what
    every router says where all before it did as they were told. The kernel path pays for them
    whether anyone reads them or not, as a benchmark of given masks has to.
    """

    masks: Masks
    ask_routers: bool = dataclasses.field(default=False, metadata={"static": True})


Routing = AllOn | Argmax | GumbelSoftmax | Forced


def execute_margin(logits: Float[Array, "*B groups 2"]) -> Float[Array, "*B groups"]:
    """Execute logit (class 0) minus skip logit (class 1): >= 0 means run."""
    return logits[..., 0] - logits[..., 1]


def logistic_noise(uniform: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """The difference of two independent Gumbel variables from one uniform draw in [0, 1].

    Softmax over two classes sees only the difference of their noises, and a difference of two
    Gumbel variables is logistic: log(u) - log(1 - u). Draws of exactly 0 or 1 are moved to the
    nearest value that keeps the noise finite.
    """
    u = jnp.clip(uniform.astype(jnp.float32), jnp.finfo(jnp.float32).tiny, 1.0 - 2.0**-24)
    return jnp.log(u) - jnp.log1p(-u)


def straight_through(
    margin: Float[Array, "*B"], noise: Float[Array, "*B"], temperature: Float[Array, ""] | float
) -> Float[Array, "*B"]:
    """Forward exactly 0.0 or 1.0; backward the gradient of sigmoid((margin + noise) / temperature).

    The two-class Gumbel-softmax of arXiv 1611.01144 with the straight-through estimator.
    """
    noisy = margin + noise
    soft = jax.nn.sigmoid(noisy / temperature)
    hard = (noisy >= 0).astype(margin.dtype)
    return hard + (soft - jax.lax.stop_gradient(soft))  # the bracket is exactly 0.0


def sample_mask(
    logits: Float[Array, "*B groups 2"], routing: GumbelSoftmax, layer: int, module: Module
) -> Float[Array, "*B groups"]:
    """One layer's training mask, with noise of its own for every layer and module."""
    key = jax.random.fold_in(routing.key, len(MODULES) * layer + MODULES.index(module))
    margin = execute_margin(logits)
    noise = logistic_noise(jax.random.uniform(key, margin.shape, jnp.float32))
    return straight_through(margin, noise, routing.temperature)
