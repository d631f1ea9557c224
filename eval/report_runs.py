"""What training left in its run folders, for a report: a row and lines of every run.

A run folder (`wide calibrate`, `wide recover`) holds `config.yaml`, `metrics.jsonl` and, once it is
finished, `model/`. Held-out figures are those with the masks of inference (argmax).
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.report_figures import (
    Figure,
    Point,
    Series,
    file_key,
    over_sparsity,
    series_from,
)
from wide_jax.hf.wide_folder import load_wide_info

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
QUALITY = "token_perplexity"


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A run folder's settings and the lines of its metrics with where each is."""

    name: str
    recipe: Mapping[str, Any]  # as in result records
    held_out: str  # the files it was evaluated on, without their folders
    tokens: int  # trained on, at the last line
    lines: tuple[tuple[str, Mapping[str, Any]], ...]  # (`run/metrics.jsonl:line`, line)

    def of_kind(self, *kinds: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The lines of these kinds, in order."""
        return ((source, line) for source, line in self.lines if line["kind"] in kinds)

    @property
    def last_evaluation(self) -> tuple[str, Mapping[str, Any]] | None:
        """The newest held-out result; after the routers' cut was set, where it was."""
        found = list(self.of_kind("held_out", "final"))
        return found[-1] if found else None


def load_training_run(folder: Path, name: str) -> TrainingRun | None:
    """The run in a folder, called `name` in the report, or None if none has begun there.

    Raises:
        ValueError: a broken line in its metrics.
    """
    if not (folder / CONFIG).exists() or not (folder / METRICS).exists():
        return None
    import yaml

    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    lines = []
    whole, _, _ = (
        (folder / METRICS).read_text(encoding="utf-8").rpartition("\n")
    )  # it may be going on
    for number, text in enumerate(whole.splitlines(), 1):
        source = f"{name}/{METRICS}:{number}"
        try:
            line = json.loads(text)
            kind = line["kind"]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(f"{source}: not a line of training metrics: {error!r}") from error
        lines.append((source, line | {"kind": kind}))
    updates = [line["update"] + 1 for _, line in lines]
    per_update = config["sequences_per_update"] * config["sequence_length"]
    return TrainingRun(
        name=name,
        recipe=_recipe(folder, config),
        held_out=", ".join(Path(file).name for file in config["evaluation_data"]),
        tokens=per_update * max(updates, default=0),
        lines=tuple(lines),
    )


def _recipe(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """From the finished model, which knows best; else from the settings."""
    if (folder / "model" / "wide_config.json").exists():
        info = load_wide_info(folder / "model")
        return {
            "method": info.training.get("method", "wide"),
            "stage": info.training.get("stage"),
            "ffn_group": info.wide.ffn_group_size,
            "attn_group": info.wide.attn_group_size,
            "budget": info.budget,
            "target": dict(info.targets),
            "updates": config["updates"],
        }
    return {
        "method": config["method"],
        "stage": 2 if "run" in config else 1,
        "ffn_group": config["ffn_group_size"],
        "attn_group": config["attn_group_size"],
        "budget": config["budget"],
        "target": config["sparsity"],
        "updates": config["updates"],
    }


def training_rows(runs: Sequence[TrainingRun], names: Sequence[str]) -> list[dict[str, str]]:
    """One row a run: `names` are what the series of a run is called, in the same order."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        row = {"run": run.name, "recipe": name, "tokens": f"{run.tokens:,}"}
        evaluated = run.last_evaluation
        figures = ("attention", "ffn", "paper", "parameters", "flops", "bytes")
        if evaluated is None:
            row |= dict.fromkeys(("held out", QUALITY, "n", *figures, "source"), "")
        else:
            source, line = evaluated
            row |= {"held out": run.held_out, QUALITY: f"{line[QUALITY]:.4g}"}
            row |= {"n": f"{line['tokens']:,}"}
            row |= {figure: f"{line['skip'][figure]:.1%}" for figure in figures}
            row |= {"source": source}
        rows.append(row)
    return rows


def training_figures(runs: Sequence[TrainingRun], names: Sequence[str]) -> list[Figure]:
    """Held-out quality against what is skipped, and the lines of training.

    `names` are the first figure's series, one a run.
    """
    found = []
    for text in dict.fromkeys(run.held_out for run in runs if run.last_evaluation is not None):
        points = []
        for run, name in zip(runs, names, strict=True):
            if run.held_out == text and run.last_evaluation is not None:
                source, line = run.last_evaluation
                points.append((name, Point(line["skip"]["flops"], line[QUALITY], source)))
        series = series_from(points)
        if len(points) < 2:
            continue  # the table says it
        title = f"{text}, held out: quality and sparsity"
        found.append(over_sparsity(file_key("held-out", text), title, QUALITY, series))
    losses = [
        Series(run.name, tuple(Point(line["update"], line["lm_loss"], s) for s, line in lines))
        for run in runs
        if (lines := list(run.of_kind("train")))
    ]
    rates = [
        Series(
            f"{run.name}: {module}",
            tuple(Point(line["update"], line["hard_skip"][module], s) for s, line in lines),
        )
        for run in runs
        if (lines := list(run.of_kind("train")))
        for module in ("attention", "ffn")
        if any(line["hard_skip"][module] for _, line in lines)
    ]
    if losses:
        title, unit = "Training: cross entropy with sampled masks", "nats a token"
        found.append(Figure("training-loss", title, "update", unit, tuple(losses)))
    if rates:
        title = "Training: what argmax masks skip"
        unit = "groups skipped"
        found.append(Figure("training-skip", title, "update", unit, tuple(rates), percent_y=True))
    return found
