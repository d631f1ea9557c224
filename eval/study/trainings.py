"""What the training logs of measured rows say, as records beside their results.

`python -m eval.study.trainings --out FOLDER`, with the folder of the runs: loss and gradient norm
of every logged update, of the very training that the row's results are of.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from eval.records import COMMON, append_record, read_records
from eval.study.findings import planned
from eval.study.plan import Row
from eval.study.settings import newest_models
from train import metrics
from wide_jax.hf.config import read_json
from wide_jax.hf.wide_folder import WIDE_CONFIG

PART = "training"
LOGGED = ("update", "lm_loss", "gradient_norm")


@dataclasses.dataclass(frozen=True)
class Args:
    """Add what the training logs of measured rows say to the results."""

    out: Path
    """Folder of the runs, a folder a row."""
    record: Path = Path("eval/results/study.jsonl")


def trainings(
    out: Path, record: Path, rows: Sequence[Row] | None = None
) -> Iterator[dict[str, Any]]:
    """A record of every row (by default, planned) with results, a log, and no such record yet."""
    every = [found for _, found in read_records(record)] if record.exists() else []
    models = newest_models(every)
    measured = {found["row"]: found for found in every}
    known = {
        found["row"]
        for found in every
        if found["part"] == PART and found["model"] == models[found["row"]]
    }
    for row in planned(every) if rows is None else rows:
        folder = out / "rows" / row.id
        if row.id in measured and row.id not in known and (folder / metrics.FILE).exists():
            found = _record(row, folder, measured[row.id])
            if found is not None:
                yield found


def _record(row: Row, folder: Path, result: dict[str, Any]) -> dict[str, Any] | None:
    """None: the log is of another training than the model beside it, or there is no model."""
    lines = [json.loads(line) for line in (folder / metrics.FILE).read_text().splitlines()]
    log = [line for line in lines if line["kind"] == "train"]
    config = folder / "model" / WIDE_CONFIG
    if not config.exists() or read_json(config)["training"]["last_lm_loss"] != log[-1]["lm_loss"]:
        return None
    shared = {name: result[name] for name in (*COMMON, "model", "recipe", "seed", "updates")}
    return shared | {
        "task": PART,
        "metric": "lm_loss",
        "value": log[-1]["lm_loss"],
        "stderr": None,
        "n": log[-1]["tokens"],
        "accounting": log[-1]["hard_skip"],
        "row": row.id,
        "part": PART,
        "settings": result["settings"],
        "log": {name: [line[name] for line in log] for name in LOGGED},
    }


def main(args: Args) -> None:
    """Append the records, and say how many."""
    found = list(trainings(args.out, args.record))
    for one in found:
        append_record(args.record, one)
    print(f"{len(found)} trainings added to {args.record}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
