"""The end of a stage: router biases moved until argmax masks skip the target on training text.

Training prices the masks it samples: a group is skipped with probability sigmoid(-margin), so a
router that is unsure everywhere (small margins, all positive) skips a quarter in training and
nothing at inference. What training has learnt is the order of the margins; where to cut is one
number a budget, and is set here. The number goes into the routers' output biases: inference stays
the plain argmax, and the files keep their format.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from train.budget import targets
from train.config import TrainConfig
from train.data import Rows
from train.parts import Params
from wide_jax.routing import Module

Skipped = Callable[[Params], Mapping[str, float]]

ROUNDS = 4  # over the modules: the rate of one depends a little on the masks of the other
STEPS = 14  # evaluations a search at most
CLOSE = 5e-4  # of a rate: near enough
FIRST = 0.0625  # the first move of a search, in logits


@dataclasses.dataclass(frozen=True)
class Shift:
    """What was moved and what came of it."""

    biases: dict[Module, float]  # added to every execute logit of the module, in logits
    before: dict[str, float]  # skipped by argmax masks, in every measure
    after: dict[str, float]

    def line(self) -> str:
        """One line for people."""
        moved = ", ".join(f"{module} {value:+.3f}" for module, value in self.biases.items())
        skipped = ", ".join(
            f"{name} {self.before[name]:.1%} -> {self.after[name]:.1%}"
            for name in ("attention", "ffn", "flops")
        )
        return f"execute biases moved to meet the target with argmax masks: {moved} ({skipped})"


@dataclasses.dataclass(frozen=True)
class SpreadRows:
    """`count` rows of `rows`, evenly spaced over all of them (some twice where there are fewer)."""

    rows: Rows
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.rows[index * len(self.rows) // self.count]


def meet_target(trainable: Params, config: TrainConfig, skipped: Skipped) -> tuple[Params, Shift]:
    """Move the routed modules' output biases until `skipped` meets the config's budget.

    Under budget `separate` each module in turn, and again until all are met; under the others one
    shift serves all. A rate falls as its module's bias rises: moves start small, grow until the
    target is passed, then halve.

    Args:
        trainable: with the routers' output biases.
        config: budget, targets and routed modules.
        skipped: what argmax masks skip with these trainables, as `HeldOut.skip` names it.
    """
    goals = _goals(config)
    biases = best = {module: 0.0 for goal in goals for module in goal.modules}
    before = after = dict(skipped(trainable))
    for _ in range(ROUNDS):
        if _distance(after, goals) <= CLOSE * len(goals):
            break
        for goal in goals:
            biases, seen = _search(trainable, goal, biases, skipped)
            if _distance(seen, goals) < _distance(after, goals):
                best, after = biases, seen
    return shifted(trainable, best), Shift(best, before, after)


@dataclasses.dataclass(frozen=True)
class _Goal:
    """A figure to bring to a value by one shift of these modules' biases."""

    modules: tuple[Module, ...]
    figure: str
    value: float


def _search(
    trainable: Params, goal: _Goal, biases: dict[Module, float], skipped: Skipped
) -> tuple[dict[Module, float], dict[str, float]]:
    """The nearest biases that a search from `biases` finds, and what they skip."""
    low = high = None  # moves that skip too much, too little
    move, best = 0.0, None
    for _ in range(STEPS):
        tried = biases | {module: biases[module] + move for module in goal.modules}
        seen = dict(skipped(shifted(trainable, tried)))
        gap = seen[goal.figure] - goal.value
        if best is None or abs(gap) < best[0]:
            best = (abs(gap), tried, seen)
        if abs(gap) <= CLOSE:
            break
        if gap > 0:
            low = move
            move = 2 * move + FIRST if high is None else (move + high) / 2
        else:
            high = move
            move = 2 * move - FIRST if low is None else (low + move) / 2
    assert best is not None  # STEPS is positive
    return best[1], best[2]


def shifted(trainable: Params, biases: Mapping[Module, float]) -> Params:
    """The trainables with `biases` added to the execute logits (class 0) of each module."""
    moved = dict(trainable)
    for name, value in trainable.items():
        for module, bias in biases.items():
            if name.endswith(f".router_{module}.router.bias"):
                execute = jnp.arange(value.shape[0]) % 2 == 0
                moved[name] = value + jnp.where(execute, jnp.float32(bias), 0.0)
    return moved


def _goals(config: TrainConfig) -> tuple[_Goal, ...]:
    if config.budget == "separate":
        return tuple(_Goal((module,), module, targets(config)[module]) for module in config.routed)
    figure: str = config.budget
    if figure == "paper" and len(config.routed) == 1:
        figure = config.routed[0]  # a module without a router counts in no mean
    return (_Goal(config.routed, figure, config.sparsity),)


def _distance(seen: Mapping[str, float], goals: tuple[_Goal, ...]) -> float:
    return sum(abs(seen[goal.figure] - goal.value) for goal in goals)
