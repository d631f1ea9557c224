"""Where a run's numbers go: one JSON line and one TensorBoard event every N updates."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from train.records import UpdateRecord
from train.tensorboard import EventWriter

FILE = "metrics.jsonl"


class MetricsLog:
    """The metrics of a run folder. A resumed run first drops lines of updates it will repeat.

    Args:
        folder: the run's.
        resume_at: the next update to run, from 0.
    """

    def __init__(self, folder: Path, *, resume_at: int = 0):
        self._path = folder / FILE
        if self._path.exists():
            _rewrite(self._path, (line for line in read(folder) if line["update"] < resume_at))
        self._events = EventWriter(folder / "tensorboard")

    def write(self, kind: str, update: int, values: Mapping[str, Any]) -> None:
        """Add a line `{"kind": ..., "update": ..., **values}`, and its numbers as events."""
        line = {"kind": kind, "update": update, **values}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        self._events.scalars(update, dict(_scalars(kind, values)))

    def close(self) -> None:
        """Close the event file."""
        self._events.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run folder; a last line that a kill cut short is left out."""
    lines = []
    for text in (folder / FILE).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def record_values(record: UpdateRecord) -> dict[str, Any]:
    """A record as plain JSON values, without its number."""
    values = dataclasses.asdict(record)
    del values["update"]
    return values


def _scalars(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


def _rewrite(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    fresh = path.with_suffix(".partial")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(fresh, path)
