"""What the results file says of every row: its figures with their standard errors."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eval.records import read_records
from eval.study.plan import LARGE_SHAPE, OWN_SHAPE, TASKS, Recipe, Row, plan
from eval.study.settings import counted_models

Key = tuple[str, str, str]  # part, task, metric


@dataclasses.dataclass(frozen=True)
class Value:
    """A figure and its standard error (None: not known)."""

    value: float
    stderr: float | None


@dataclasses.dataclass(frozen=True)
class Result:
    """What is known of a row, from its last record of each kind."""

    row: Row
    records: dict[Key, dict[str, Any]]
    sources: dict[Key, str]  # file:line of each

    def part(self, part: str) -> dict[str, Any] | None:
        """The record of a part that has one."""
        return next((r for key, r in self.records.items() if key[0] == part), None)

    def has(self, part: str) -> bool:
        """Whether nothing of the part is missing: of tasks all seven, of speed both shapes."""
        if part in ("tasks", "whole_tasks"):
            return self.mean(part) is not None
        if part == "speed":
            return {OWN_SHAPE, LARGE_SHAPE} <= {t for p, t, _ in self.records if p == part}
        return self.part(part) is not None

    def source(self, part: str) -> str:
        """Where that record is."""
        return next(s for key, s in self.sources.items() if key[0] == part)

    @property
    def perplexity(self) -> Value | None:
        """Token perplexity of WikiText-2."""
        found = self.part("perplexity")
        return None if found is None else Value(found["value"], found["stderr"])

    @property
    def loss(self) -> Value | None:
        """Its logarithm, nats a token."""
        found = self.perplexity
        if found is None:
            return None
        error = None if found.stderr is None else found.stderr / found.value
        return Value(math.log(found.value), error)

    def task(self, task: str, part: str = "tasks") -> Value | None:
        """The task's accuracy by the metric that the field reports."""
        found = self.records.get((part, task, TASKS[task]))
        return None if found is None else Value(found["value"], found["stderr"])

    def mean(self, part: str = "tasks") -> Value | None:
        """The mean of the seven tasks; None unless all are there."""
        found = [self.task(task, part) for task in TASKS]
        known = [value for value in found if value is not None]
        if len(known) < len(found):
            return None
        spread = math.sqrt(sum((value.stderr or 0.0) ** 2 for value in known))
        return Value(sum(v.value for v in known) / len(known), spread / len(known))

    @property
    def window_losses(self) -> np.ndarray | None:
        """Mean loss of every window, nats a token; all windows are of one length."""
        found = self.part("perplexity")
        if found is None:
            return None
        return np.asarray(found["window_losses"]) * found["windows"] / found["n"]

    @property
    def accounting(self) -> Mapping[str, float] | None:
        """What was skipped on WikiText-2."""
        found = self.part("perplexity")
        return None if found is None else found["accounting"]


Results = Mapping[str, Result]


def read(record: Path) -> Results:
    """Results by row id, in the plan's order, of every recipe that the records name.

    Of a row that was trained more than once, of the model that counts (`counted_models`).
    """
    entries: list[tuple[str, dict[str, Any]]] = []
    if record.exists():
        entries = [(f"{record.name}:{n}", r) for n, r in read_records(record)]
    rows = {row.id: row for row in planned(r for _, r in entries)}
    models = counted_models(r for _, r in entries)
    entries = [(source, r) for source, r in entries if r["model"] == models[r["row"]]]
    found: dict[str, Result] = {}
    for source, entry in entries:
        if entry["row"] not in rows:
            raise ValueError(f"{record}: {source} is of row {entry['row']!r}, which no plan has")
        result = found.setdefault(entry["row"], Result(rows[entry["row"]], {}, {}))
        key = (entry["part"], entry["task"], entry["metric"])
        result.records[key], result.sources[key] = entry, source
    return {name: found[name] for name in rows if name in found}


def planned(records: Iterable[Mapping[str, Any]] = ()) -> tuple[Row, ...]:
    """The plan's rows, and those of the shorter or longer runs that have been made of it.

    Wave by wave, in each first the plan's own.
    """
    default = Recipe()
    lengths = {r["updates"] for r in records if r["updates"] is not None}
    lengths -= {default.updates, default.long_updates}
    every = {row.id: row for row in plan(default)}
    for updates in sorted(lengths):
        every |= {row.id: row for row in plan(dataclasses.replace(default, updates=updates))}
    return tuple(sorted(every.values(), key=lambda row: row.wave))


def retention(value: Value | None, dense: Value | None) -> Value | None:
    """Of the dense figure, as a fraction; both errors count, as if they were independent."""
    if value is None or dense is None:
        return None
    ratio = value.value / dense.value
    errors = [(v.stderr or 0.0) / v.value if v.value else 0.0 for v in (value, dense)]
    return Value(ratio, ratio * math.hypot(*errors))


@dataclasses.dataclass(frozen=True)
class Difference:
    """One row's loss minus another's on the same windows, nats a token, with a 95 % interval."""

    value: float
    low: float
    high: float


def difference(one: Result, other: Result) -> Difference | None:
    """Window by window, so that what makes a window hard for both drops out; by bootstrap."""
    first, second = one.window_losses, other.window_losses
    if first is None or second is None or len(first) != len(second):
        return None
    gaps = first - second
    low, high = bootstrap(gaps)
    return Difference(float(gaps.mean()), low, high)


def bootstrap(values: np.ndarray, *, samples: int = 4_000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean: 2.5th and 97.5th percentile over resampled windows."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (samples, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
