"""What all rows are made and measured with, and what there is of a row already."""

import dataclasses
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from eval.check_values import WIKITEXT
from eval.records import read_records
from eval.study.plan import GENERATION, LARGE_SHAPE, OWN_SHAPE, TASKS, Row
from wide_jax.cli.files import write_json
from wide_jax.hf.config import read_config
from wide_jax.hf.load import find_weights
from wide_jax.hf.resolve import resolve_model
from wide_jax.hf.save import fingerprint
from wide_jax.hf.wide_folder import base_folder

Part = Literal["perplexity", "tasks", "errors", "whole_tasks", "generation", "speed"]
DType = Literal["float32", "bfloat16"]
THRESHOLDS = "thresholds.npy"
CONTENTS = ("base", "calibration", "text")  # of records: what was read, by its hash


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all rows are made and measured with."""

    out: Path
    """Folder of the runs, a folder a row, and of logs."""
    record: Path = Path("eval/results/study.jsonl")
    """Results, a JSON line each; what is in it is not measured again."""
    model: str | None = None
    """A dense model folder or hub id; by default the embedded SmolLM2-135M-Instruct."""
    data_dir: Path = Path("../shared/data")
    """Folder of the calibration text, of WikiText-2 and of the tasks."""
    calibration: Path = Path("calib/calib_prose.jsonl.gz")
    """Within `data_dir`: what is trained on."""
    text: Path = Path(WIKITEXT)
    """Within `data_dir`: what perplexity is measured on."""

    dtype: DType = "bfloat16"
    """Of the weights in training. All measurements are in float32."""
    sequence_length: int = 2_048
    sequences_per_update: int = 16
    accumulation: int = 1
    router_rank: int = 32
    threshold_rows: int = 64
    """Training rows on which the masks' cut is set, as in `wide calibrate`; the baseline without
    training takes as many as one update has."""
    save_every: int = 100
    """Updates that a kill can lose."""

    window: int = 2_048
    """Tokens of a perplexity window."""
    max_windows: int | None = None
    """Only the first so many; None: all."""
    error_windows: int = 8
    """Windows on which every layer is compared with the dense model."""
    batch_size: int = 8
    tasks: tuple[str, ...] = tuple(TASKS)
    limit: int = 500
    """Documents of each task, but for the rows that take all."""

    def recorded(self) -> dict[str, Any]:
        """What a result depends on beside its row, as records say it; reads model and texts."""
        return self.numbers() | self.contents()

    def contents(self) -> dict[str, str]:
        """The base model and the texts, each by a hash of what it holds, wherever it lies.

        Raises:
            FileNotFoundError: there is no such model or text.
        """
        texts = [(self.data_dir / file).resolve() for file in (self.calibration, self.text)]
        hashes = (
            _base_hash(base_folder(resolve_model(self.model)).resolve()),
            *map(_text_hash, texts),
        )
        return dict(zip(CONTENTS, hashes, strict=True))

    def numbers(self) -> dict[str, Any]:
        """The settings among it."""
        return {
            "training_dtype": self.dtype,
            "sequence_length": self.sequence_length,
            "tokens_per_update": self.sequence_length * self.sequences_per_update,
            "router_rank": self.router_rank,
            "threshold_rows": self.threshold_rows,
            "evaluation_dtype": "float32",
            "window": self.window,
            "max_windows": self.max_windows,
            "error_windows": self.error_windows,
            "limit": self.limit,
        }

    def folder(self, row: Row) -> Path:
        """The row's run folder."""
        return self.out / "rows" / row.id

    def fingerprint(self, row: Row) -> Path:
        """Names the row's model at hand, once it is known; empty while a new one is made."""
        return self.out / "fingerprints" / row.id

    @property
    def locks(self) -> Path:
        """Where processes agree on whose turn it is."""
        return self.out / "locks"

    def is_made(self, row: Row) -> bool:
        """Whether the row's model is there; the dense one always is."""
        if row.method == "dense":
            return True
        if row.method == "threshold":
            return (self.folder(row) / THRESHOLDS).exists()
        return (self.folder(row) / "model" / "wide_config.json").exists()

    def tasks_of(self, part: Part) -> tuple[str, ...]:
        """What the part has a record of each for; empty where it has one record."""
        if part == "generation":
            return (GENERATION,)
        if part == "speed":
            return (OWN_SHAPE, LARGE_SHAPE)
        return self.tasks if part in ("tasks", "whole_tasks") else ()


def parts_of(row: Row) -> tuple[Part, ...]:
    """What is measured of a row, in order of value."""
    parts: list[Part] = ["perplexity", "tasks"]
    if row.method != "dense":
        parts.append("errors")
    if row.whole_tasks:
        parts.append("whole_tasks")
    if row.generation:
        parts.append("generation")
    if row.speed:
        parts.append("speed")
    return tuple(parts)


def models_at_hand(rows: Iterable[Row], settings: Settings) -> dict[str, str]:
    """Of every row whose model is there and known, its fingerprint; empty: not measured yet."""
    files = {row.id: settings.fingerprint(row) for row in rows}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def name_model(row: Row, settings: Settings, fingerprint: str) -> None:
    """Write down which model of the row is at hand; empty: a new one is about to be made."""
    file = settings.fingerprint(row)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, fingerprint)


def counted_models(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The model of each row that most figures are of; of several the one measured last.

    Records of another do not count beside them: a training repeated on a GPU is another one, and a
    row's figures belong together. So a repetition takes a row's place when as much is measured of
    it, and one that was cut short does not.
    """
    figures: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    last: dict[tuple[str, str], int] = {}
    for number, record in enumerate(records):
        name = record["row"], record["model"]
        measured = figures.setdefault(name, set())
        if record["part"] in get_args(Part):  # the log of a training comes with any of them
            measured.add((record["part"], record["task"], record["metric"]))
        last[name] = number
    ordered = sorted(figures, key=lambda name: (len(figures[name]), last[name]))
    return dict(ordered)  # (row, model) pairs: of a row's models the last one stays


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the results file holds: (row, part, task, metric) of the records that count."""

    found: frozenset[tuple[str, str, str, str]]

    @classmethod
    def read(cls, settings: Settings, models: Mapping[str, str] | None = None) -> "Measured":
        """Of the study's results file; an absent one holds nothing.

        Args:
            settings: of the study.
            models: of rows whose model is known, its fingerprint: only records of it count; of
                other rows those of `counted_models`.

        Raises:
            ValueError: it holds results of other settings; the message says which.
        """
        if not settings.record.exists():
            return cls(frozenset())
        records = [record for _, record in read_records(settings.record)]
        _check(settings, records, settings.numbers())
        of = counted_models(records) | dict(models or {})
        counted = (r for r in records if r["model"] == of[r["row"]])
        return cls(frozenset((r["row"], r["part"], r["task"], r["metric"]) for r in counted))

    def has(self, row: Row, part: Part, settings: Settings) -> bool:
        """Whether nothing of the part is missing."""
        return not self.missing_tasks(row, part, settings)

    def missing_tasks(self, row: Row, part: Part, settings: Settings) -> tuple[str, ...]:
        """The tasks of the part without a record; `(part,)` for a part that is no task.

        A task has several metrics, written one by one: it is known by the one that the study reads.
        """
        tasks = settings.tasks_of(part)
        known = {(task, metric) for r, p, task, metric in self.found if (r, p) == (row.id, part)}
        if not tasks:
            return () if known else (part,)
        read = {task: TASKS.get(task) for task in tasks}
        done = {task for task, metric in known if read.get(task) in (None, metric)}
        return tuple(task for task in tasks if task not in done)


def check_contents(settings: Settings) -> None:
    """Refuse a results file of another model or other texts, before anything is made.

    Records of before these were written down name the base by the dense row's model, if at all.

    Raises:
        ValueError: what differs, and in which row.
        FileNotFoundError: there is no such model or text.
    """
    own = settings.contents()
    if settings.record.exists():
        _check(settings, [record for _, record in read_records(settings.record)], own)


@functools.cache
def _base_hash(folder: Path) -> str:
    return fingerprint(find_weights(folder, read_config(folder)))


@functools.cache
def _text_hash(file: Path) -> str:
    """Of the text itself: compressed again, it is the same."""
    opened = gzip.open if file.suffix == ".gz" else open
    digest = hashlib.sha256()
    with opened(file, "rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _check(settings: Settings, records: Iterable[dict[str, Any]], own: Mapping[str, Any]) -> None:
    for record in records:
        theirs = dict(record["settings"])
        if record["row"] == "dense":
            theirs.setdefault("base", record["model"])
        differ = [
            f"{name} {theirs.get(name)!r}, not {value!r}"
            for name, value in own.items()
            if theirs.get(name) != value and (name in theirs or name not in CONTENTS)
        ]
        if differ:
            raise ValueError(
                f"{settings.record} holds results of another study (row {record['row']}: "
                f"{'; '.join(differ)}): name another --record, or the same settings"
            )
