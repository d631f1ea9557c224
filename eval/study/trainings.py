"""What the training logs of measured rows say, as records beside their results.

`python -m eval.study.trainings --out FOLDER`, with the folder of the runs: loss and gradient norm
of every logged update, of the very training that the row's results are of. `make study` adds them
by itself.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from eval.records import COMMON, append_record, read_records
from eval.study.findings import planned
from eval.study.plan import Row
from eval.study.settings import Settings, counted_models, models_at_hand
from train import metrics

PART = "training"
LOGGED = ("update", "lm_loss", "gradient_norm")


@dataclasses.dataclass(frozen=True)
class Args:
    """Add what the training logs of measured rows say to the results."""

    out: Path
    """Folder of the runs, a folder a row."""
    record: Path = Path("eval/results/study.jsonl")


def trainings(settings: Settings, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A record of every row whose counted model is at hand with its log, and that has none yet."""
    record = settings.record
    every = [found for _, found in read_records(record)] if record.exists() else []
    models, at_hand = counted_models(every), models_at_hand(rows, settings)
    measured = {(found["row"], found["model"]): found for found in every}
    known = {(found["row"], found["model"]) for found in every if found["part"] == PART}
    for row in rows:
        folder = settings.folder(row)
        model = models.get(row.id)
        same = model is not None and model == at_hand.get(row.id) and (row.id, model) not in known
        if same and (folder / metrics.FILE).exists():
            yield _record(row, metrics.read(folder), measured[row.id, model])


def _record(row: Row, lines: Sequence[dict[str, Any]], result: dict[str, Any]) -> dict[str, Any]:
    log = [line for line in lines if line["kind"] == "train"]
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


def append_trainings(settings: Settings, rows: Sequence[Row]) -> int:
    """Append the records; how many there were."""
    found = list(trainings(settings, rows))
    for one in found:
        append_record(settings.record, one)
    return len(found)


def main(args: Args) -> None:
    """Append the records of all planned rows, and say how many."""
    every = [found for _, found in read_records(args.record)]
    count = append_trainings(Settings(out=args.out, record=args.record), planned(every))
    print(f"{count} trainings added to {args.record}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
