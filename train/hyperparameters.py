"""The numbers of a run that its compiled step takes as inputs, beside weights and tokens.

Compiling a step takes longer than many updates. Runs that differ in nothing but these numbers, the
seed and the data have the same program, which JAX's compile cache then holds once for all of them.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float

from train.config import TrainConfig
from wide_jax.routing import Module

Number = Float[Array, ""] | np.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """What the budget term aims at, as fractions of 1."""

    sparsity: Number  # of all modules together; not used by budget `separate`
    modules: dict[Module, Number]  # each module's own; used by budget `separate` alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Targets, weights of the loss, schedules. Adam's constants stay in the program."""

    targets: Targets
    alpha: Number
    distill_weight: Number
    learning_rate: Number  # peak
    warmup_updates: Number
    updates: Number
    tau_start: Number
    tau_end: Number


def hyperparameters(config: TrainConfig) -> Hyperparameters:
    """Those of a run, float32 scalars on the host."""
    return Hyperparameters(
        targets=Targets(
            sparsity=np.float32(config.sparsity),
            modules={name: np.float32(value) for name, value in config.module_targets.items()},
        ),
        alpha=np.float32(config.alpha),
        distill_weight=np.float32(config.distill_weight),
        learning_rate=np.float32(config.learning_rate),
        warmup_updates=np.float32(config.warmup_updates),
        updates=np.float32(config.updates),
        tau_start=np.float32(config.tau_start),
        tau_end=np.float32(config.tau_end),
    )
