"""Moving the routers' cut until masks skip a target: the search, whatever is moved and measured.

A router's margins order the groups; where to cut is one number a module. Adding a bias b to every
execute logit is the same as lowering the threshold by b: the more, the less is skipped.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from wide_jax.routing import Module

Biases = Mapping[Module, float]
Skipped = Callable[[Biases], Mapping[str, float]]

ROUNDS = 4  # over the goals: the rate of one module depends a little on the masks of the other
STEPS = 14  # evaluations a search at most
CLOSE = 5e-4  # of a rate: near enough
FIRST = 0.0625  # the first move of a search, in logits


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure to bring to a value by one move of these modules' biases."""

    modules: tuple[Module, ...]
    figure: str
    value: float


@dataclasses.dataclass(frozen=True)
class Met:
    """The biases that came nearest, in logits, and what is skipped without and with them."""

    biases: dict[Module, float]
    before: dict[str, float]
    after: dict[str, float]


def meet(goals: Sequence[Goal], skipped: Skipped) -> Met:
    """Find biases that bring every goal's figure to its value.

    Each goal in turn, and again until all are met. A rate falls as its module's bias rises: moves
    start small, grow until the target is passed, then halve.

    Args:
        goals: of different modules.
        skipped: what the masks skip with these biases, by figure.
    """
    biases = best = {module: 0.0 for goal in goals for module in goal.modules}
    before = after = dict(skipped(biases))
    for _ in range(ROUNDS):
        if _distance(after, goals) <= CLOSE * len(goals):
            break
        for goal in goals:
            biases, seen = _search(goal, biases, skipped)
            if _distance(seen, goals) < _distance(after, goals):
                best, after = biases, seen
    return Met(best, before, after)


def shifted(
    tensors: Mapping[str, Float[Array, "..."]], biases: Biases
) -> dict[str, Float[Array, "..."]]:
    """Tensors by Hugging Face name, with `biases` added to the execute logits (class 0).

    Only the output biases of the modules' routers change; the others are the same arrays.
    """
    moved = dict(tensors)
    for name, value in tensors.items():
        for module, bias in biases.items():
            if name.endswith(f".router_{module}.router.bias"):
                execute = jnp.arange(value.shape[0]) % 2 == 0
                moved[name] = value + jnp.where(execute, jnp.float32(bias), 0.0)
    return moved


def _search(
    goal: Goal, biases: dict[Module, float], skipped: Skipped
) -> tuple[dict[Module, float], dict[str, float]]:
    """The nearest biases that a search from `biases` finds, and what they skip."""
    low = high = None  # moves that skip too much, too little
    move, best = 0.0, None
    for _ in range(STEPS):
        tried = biases | {module: biases[module] + move for module in goal.modules}
        seen = dict(skipped(tried))
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


def _distance(seen: Mapping[str, float], goals: Sequence[Goal]) -> float:
    return sum(abs(seen[goal.figure] - goal.value) for goal in goals)
