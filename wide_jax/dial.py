"""Moving the routers' cut until masks skip a target: the search, whatever is moved and measured.

A router's margins order the groups; where to cut is one number a module. Adding a bias b to every
execute logit is the same as lowering the threshold by b: the more, the less is skipped.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from wide_jax.routing import Module

Biases = Mapping[Module, float]
Skipped = Callable[[Biases], Mapping[str, float]]

TOGETHER = 12  # evaluations in which all goals move: 4 to 9 are enough where figures are smooth
MOST = 60  # in all; after those, goals move one at a time
CLOSE = 5e-4  # of a rate: near enough
FIRST = 0.0625  # the first move, in logits
GROWTH = 4.0  # of a move in a direction where nothing is known yet
FURTHEST = 16.0  # times the last move: as far as a straight line is followed
NARROW = 1e-5  # logits: what jumps over its value within so little has no better cut
EDGE = 1e-4  # rates are taken to be so far from 0 and 1 at least, where logits are taken


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

    A rate falls as its module's bias rises, and its logit nearly in a straight line: every goal
    follows its own line from evaluation to evaluation, held between moves that skip too much and
    too little. All goals move at once: what one moves for another (a module's rate depends a little
    on the masks of the other) is seen at the next evaluation. Where it depends on them so much that
    this does not end, goals move one at a time.

    Args:
        goals: of different modules.
        skipped: what the masks skip with these biases, by figure.

    Returns:
        The biases that came nearest, of at most `MOST` tried.
    """
    searches = [_Search(goal) for goal in goals]
    tried = _Tried(searches, skipped)
    while tried.count < TOGETHER and any([search.advance() for search in searches]):
        tried.look()
    nearest = math.inf
    while not tried.settled and tried.distance < nearest and tried.count < MOST:
        nearest = tried.distance
        for search in searches:
            search.begin()
            while tried.count < MOST and search.advance():
                tried.look()
    return Met(tried.best, tried.before, tried.after)


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


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A move, and how far the figure's logit was above the goal's."""

    move: float
    gap: float


@dataclasses.dataclass
class _Search:
    """One goal's search: where it stands and what it knows."""

    goal: Goal
    move: float = 0.0
    met: bool = False
    last: _Seen | None = None
    previous: _Seen | None = None
    low: _Seen | None = None  # the highest move seen to skip too much
    high: _Seen | None = None  # the lowest seen to skip too little

    def begin(self) -> None:
        """Forget what was seen while others moved, but for where it stands."""
        self.previous = None
        self.low = self.low if self.low == self.last else None
        self.high = self.high if self.high == self.last else None

    def saw(self, rate: float) -> None:
        """Learn what the present move skips; what contradicts it was seen with other biases."""
        self.met = abs(rate - self.goal.value) <= CLOSE
        seen = _Seen(self.move, _logit(rate) - _logit(self.goal.value))
        self.previous, self.last = self.last, seen
        if rate > self.goal.value:
            self.low = seen
            if self.high is not None and self.high.move <= seen.move:
                self.high = None
        elif rate < self.goal.value:
            self.high = seen
            if self.low is not None and self.low.move >= seen.move:
                self.low = None

    def advance(self) -> bool:
        """Go to the next move; False: it is met, or there is none better."""
        if self.met or self.narrow:
            return False
        if self.low is None or self.high is None:
            self.move += self._outward()
        else:
            self.move = self._between(self.low, self.high)
        return True

    @property
    def narrow(self) -> bool:
        """Whether the figure jumps over its value."""
        if self.low is None or self.high is None:
            return False
        return self.high.move - self.low.move <= NARROW

    def _outward(self) -> float:
        """A step to where the figure was not seen on the other side of its value."""
        assert self.last is not None  # seen before it moves
        towards = 1.0 if self.high is None else -1.0
        if self.previous is None or self.previous.move == self.last.move:
            return towards * FIRST
        moved = self.last.move - self.previous.move
        rise = self.last.gap - self.previous.gap
        found = -towards * self.last.gap * moved / rise if rise else 0.0
        along = min(found, FURTHEST * abs(moved)) if found > 0 else GROWTH * abs(moved)
        return towards * max(along, FIRST / 2)

    def _between(self, low: _Seen, high: _Seen) -> float:
        """Where the line from low to high meets the goal; the middle where lines are slow."""
        assert self.last is not None
        same_side = self.previous is not None and (self.previous.gap > 0) == (self.last.gap > 0)
        if same_side or low.gap <= high.gap:
            return (low.move + high.move) / 2
        return low.move + (high.move - low.move) * low.gap / (low.gap - high.gap)


class _Tried:
    """The evaluations so far: how many, the first and the best."""

    def __init__(self, searches: Sequence[_Search], skipped: Skipped):
        self._searches, self._skipped = searches, skipped
        self.count, self.distance = 0, math.inf
        self.best: dict[Module, float] = {}
        self.after: dict[str, float] = {}
        self.look()
        self.before = self.after

    def look(self) -> None:
        """Evaluate where the searches stand, and tell them."""
        biases = {module: s.move for s in self._searches for module in s.goal.modules}
        seen = dict(self._skipped(biases))
        distance = sum(abs(seen[s.goal.figure] - s.goal.value) for s in self._searches)
        if distance < self.distance:
            self.best, self.after, self.distance = biases, seen, distance
        self.count += 1
        for search in self._searches:
            search.saw(seen[search.goal.figure])

    @property
    def settled(self) -> bool:
        """Whether every figure has its value, or the only one jumps over it."""
        alone = len(self._searches) == 1
        return all(search.met or (alone and search.narrow) for search in self._searches)


def _logit(rate: float) -> float:
    inside = min(max(rate, EDGE), 1 - EDGE)
    return math.log(inside / (1 - inside))
