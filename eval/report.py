"""One report from run folders (`wide report RUNS... --out DIR`): tables, figures, their sources.

Reads the result records (`eval.records`) and training metrics of every run and writes `report.md`,
`report.html` and `figures/`: one SVG a figure, and beside it a JSON file with every point and the
file and line it came from. Nothing is measured or typed in here.
"""

import collections
import dataclasses
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.records import ACCOUNTING, FIELDS, check_record
from eval.report_figures import (
    Figure,
    Point,
    Series,
    draw,
    file_key,
    over_sparsity,
    series_from,
    spans_decades,
    unit_label,
)
from eval.report_runs import (
    METRICS,
    TrainingRun,
    load_training_run,
    training_figures,
    training_rows,
)

LISTED = 200  # points of a figure up to which the page lists them; the JSON file has all
QUALITY = ("eval", "study")  # suites of qualities; a study's records have all that `eval` has
SHOWN = (*QUALITY, "e2e", "errors")  # suites that a report has figures or tables of


@dataclasses.dataclass(frozen=True)
class Sourced:
    """A record and where it was read: `run/file.jsonl:line`."""

    record: Mapping[str, Any]
    source: str


@dataclasses.dataclass(frozen=True)
class Runs:
    """Records and training metrics of all runs, and the JSON lines files that hold neither."""

    records: tuple[Sourced, ...]
    trained: tuple[TrainingRun, ...]
    passed_over: tuple[str, ...]


def load_runs(paths: Sequence[Path]) -> Runs:
    """Every record of the runs: a folder's `*.jsonl` files (not deeper), or single files.

    A training run's folder also gives its metrics. Files whose first line has no `suite` (answers,
    samples) are passed over and listed. A record that is met twice counts once.

    Raises:
        FileNotFoundError: no such run.
        ValueError: a broken line in a file of records, or nothing to report.
    """
    records: dict[str, Sourced] = {}
    trained: list[TrainingRun] = []
    passed_over: list[str] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no run at {path}")
    names = _short_names([_folder(path) for path in paths])
    for path in paths:
        short = names[_folder(path)]
        run = load_training_run(path, short)
        if run is not None:
            trained.append(run)
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            if run is not None and file.name == METRICS:
                continue
            name = f"{short}/{file.name}"
            found = _records(file, name)
            if found is None:
                passed_over.append(name)
                continue
            for one in found:
                records.setdefault(json.dumps(one.record, sort_keys=True), one)
    if not records and not trained:
        raise ValueError(
            f"nothing to report in {', '.join(map(str, paths))}: no result records (wide eval, "
            "wide bench) and no training run"
        )
    return Runs(tuple(records.values()), tuple(trained), tuple(passed_over))


def _folder(path: Path) -> Path:
    return path.resolve() if path.is_dir() else path.resolve().parent


def _short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Each folder by the end of its path, as much of it as tells them apart."""
    folders, length = list(dict.fromkeys(folders)), 1
    while True:
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return dict(zip(folders, names, strict=True))
        length += 1


def _records(file: Path, name: str) -> list[Sourced] | None:
    """The file's records; None if its first line is none."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        source = f"{name}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}: not JSON: {error}") from error
        known = isinstance(record, dict) and record.get("suite") in FIELDS
        if not found and not known:
            return None
        if not known:
            raise ValueError(f"{source}: not a result record, among records")
        check_record(record, source)
        found.append(Sourced(record, source))
    return found or None


def label(recipe: Mapping[str, Any], *, without: Iterable[str] = ()) -> str:
    """A series name from a recipe: `wide, stage 1, G 64, heads 3, separate, 25 %, 300 updates`."""
    left = {key: value for key, value in recipe.items() if key not in set(without)}
    parts = [str(left.get("method", "?"))]
    if left.get("stage") is not None:
        parts.append(f"stage {left['stage']}")
    if left.get("ffn_group") is not None:
        parts.append(f"G {left['ffn_group']}")
    if left.get("attn_group") is not None:
        parts.append(f"heads {left['attn_group']}")
    if left.get("budget") is not None:
        parts.append(str(left["budget"]))
    if left.get("target") is not None:
        parts.append(_target(left["target"]))
    if left.get("distill") not in (None, "off"):
        parts.append(f"distill {left['distill']}")
    if left.get("updates") is not None:
        parts.append(f"{left['updates']:,} updates")
    return ", ".join(parts)


def _target(target: float | Mapping[str, float]) -> str:
    """`25 %`, or `attention 25 %, ffn 40 %` where modules differ or only one has a target."""
    if not isinstance(target, Mapping):
        return f"{100 * target:g} %"
    if len(target) > 1 and len(set(target.values())) == 1:
        return _target(next(iter(target.values())))
    return ", ".join(f"{module} {_target(value)}" for module, value in target.items())


def figures(runs: Runs) -> list[Figure]:
    """Every figure the runs are enough for."""
    records, found = runs.records, []
    evals = [r for r in records if r.record["suite"] in QUALITY]
    measured: dict[tuple[str, str], dict[int, list[Sourced]]] = {}
    for r in evals:
        sizes = measured.setdefault((r.record["task"], r.record["metric"]), {})
        sizes.setdefault(r.record["n"], []).append(r)
    for (task, metric), sizes in measured.items():
        for n, same in sizes.items():  # of more or fewer documents is another figure
            name = task if len(sizes) == 1 else f"{task}, n {n:,}"
            found += [
                *_quality_sparsity(name, metric, same),
                *_group_sizes(name, metric, same),
                *_quality_speed(name, metric, same, records),
            ]
    found += _allocation(evals)
    found += _layer_errors([r for r in records if r.record["suite"] == "errors"])
    names = [label(run.recipe, without=["target"]) for run in runs.trained]
    return found + training_figures(runs.trained, names)


def _quality_sparsity(task: str, metric: str, records: Sequence[Sourced]) -> list[Figure]:
    if len(records) < 2:
        return []  # the table says it
    series = _series(
        (label(r.record["recipe"], without=["target"]), r.record["accounting"]["flops"], r)
        for r in records
    )
    title = f"{task}, {metric}: quality and sparsity"
    return [over_sparsity(file_key("sparsity", task, metric), title, metric, series)]


def _group_sizes(task: str, metric: str, records: Sequence[Sourced]) -> list[Figure]:
    rows = [
        (label(r.record["recipe"], without=["ffn_group"]), r.record["recipe"]["ffn_group"], r)
        for r in records
        if r.record["recipe"].get("ffn_group") is not None
        and r.record["recipe"].get("method") == "wide"
    ]
    if len({x for _, x, _ in rows}) < 2:
        return []
    series = _series(rows)
    return [
        Figure(
            key=file_key("groups", task, metric),
            title=f"{task}, {metric}: FFN group size",
            x_label="FFN channels a group",
            y_label=unit_label(metric),
            series=series,
            log_x=True,
            log_y=spans_decades(metric, series),
        )
    ]


def _quality_speed(
    task: str, metric: str, records: Sequence[Sourced], every: Sequence[Sourced]
) -> list[Figure]:
    """Against measured speedup: of the record itself, or of end-to-end runs of the same model."""
    found = []
    for phase in ("prefill", "decode"):
        rows: list[tuple[str, Point]] = []
        for r in records:
            name = label(r.record["recipe"], without=["target"])
            value, error = r.record["value"], r.record["stderr"]
            own = ((r.record.get("speedup") or {}).get(phase) or {}).get("measured")
            if own is not None:
                rows.append((name, Point(own, value, r.source, error)))
            for e in every:
                if _is_speed_of(e.record, r.record["model"], phase):
                    place = f"batch {e.record['batch']}, {e.record['tokens']} tokens"
                    point = Point(e.record["speedup"], value, f"{r.source} + {e.source}", error)
                    rows.append((f"{name}; {place}", point))
        if rows:
            series = series_from(rows)
            found.append(
                Figure(
                    key=file_key(f"speed-{phase}", task, metric),
                    title=f"{task}, {metric}: quality and measured {phase} speed",
                    x_label=f"measured {phase} speedup over the best dense",
                    y_label=unit_label(metric),
                    series=series,
                    log_y=spans_decades(metric, series),
                )
            )
    return found


def _is_speed_of(record: Mapping[str, Any], model: str, phase: str) -> bool:
    """Whether this is the end-to-end time of the pruned model in that phase."""
    if record["suite"] != "e2e" or record.get("speedup") is None:
        return False
    return (record["model"], record["phase"], record["variant"]) == (model, phase, "wide")


def _allocation(records: Sequence[Sourced]) -> list[Figure]:
    """What each layer skips: the last record of each model and recipe that has its layers."""
    last = {
        (r.record["model"], label(r.record["recipe"])): r for r in records if r.record.get("layers")
    }
    series = []
    for (_, name), r in last.items():
        for module in ("attention", "ffn"):
            rates = r.record["layers"][module]
            if any(rates):
                points = tuple(Point(i, rate, r.source) for i, rate in enumerate(rates))
                series.append(Series(f"{name}: {module}", points))
    if not series:
        return []
    title = "What each layer skips"
    return [
        Figure("allocation", title, "layer", "groups skipped", tuple(series), percent_y=True),
    ]


def _layer_errors(records: Sequence[Sourced]) -> list[Figure]:
    found = []
    for number, r in enumerate(records):
        for what, y_label in (
            ("error", "relative L2 error to dense"),
            ("cosine", "cosine similarity to dense"),
        ):
            series = tuple(
                Series(part, tuple(Point(i, y, r.source) for i, y in enumerate(values[what])))
                for part, values in r.record["layers"].items()
            )
            title = f"{r.record['task']}, {label(r.record['recipe'])}: {y_label}"
            found.append(Figure(f"layers-{what}-{number}", title, "layer", y_label, series))
    return found


def _series(rows: Iterable[tuple[str, int | float, Sourced]]) -> tuple[Series, ...]:
    return series_from(
        (name, Point(x, r.record["value"], r.source, r.record["stderr"])) for name, x, r in rows
    )


def eval_rows(records: Sequence[Sourced]) -> list[dict[str, str]]:
    """The table of results: one row a record, the six figures of the accounting in each."""
    rows = []
    for r in records:
        if r.record["suite"] not in QUALITY:
            continue
        record = r.record
        row = {
            "task": record["task"],
            "metric": record["metric"],
            "recipe": label(record["recipe"]),
            "seed": "" if record["seed"] is None else str(record["seed"]),
            "value": with_error(record["value"], record["stderr"]),
            "n": f"{record['n']:,}",
        }
        row |= {name: f"{record['accounting'][name]:.1%}" for name in ACCOUNTING}
        row |= _own_speedup(record)
        row |= {"model": _model(record), "source": r.source}
        rows.append(row)
    empty = [
        name for name in ("prefill", "decode") if not any(row[f"{name} speedup"] for row in rows)
    ]
    return [
        {key: value for key, value in row.items() if key.removesuffix(" speedup") not in empty}
        for row in rows
    ]


def with_error(value: float, error: float | None) -> str:
    """`95.7 ± 11.6`: as many places as the error has two digits in."""
    if error is None or not error > 0:
        return f"{value:.4g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:,.{places}f} ± {error:,.{places}f}"


def _own_speedup(record: Mapping[str, Any]) -> dict[str, str]:
    """`1.23x (ideal 1.31x)` a phase, where it was measured with the quality."""
    found = {}
    for phase in ("prefill", "decode"):
        own = (record.get("speedup") or {}).get(phase)
        text = "" if own is None else f"{own['measured']:.2f}x (ideal {own['ideal']:.2f}x)"
        found[f"{phase} speedup"] = text
    return found


def other_rows(records: Sequence[Sourced]) -> list[dict[str, str]]:
    """Measured speeds: one row an end-to-end record."""
    names = ("model", "phase", "batch", "tokens", "sparsity", "mask", "variant")
    rows = []
    for r in records:
        if r.record["suite"] != "e2e":
            continue
        row = {name: str(r.record[name]) for name in names} | {"ms": f"{r.record['ms']:.4g}"}
        speedup = r.record.get("speedup")
        row["sparsity"] = f"{r.record['sparsity']:.1%}"
        row["speedup"] = "" if speedup is None else f"{speedup:.2f}x"
        rows.append(row | {"model": _model(r.record), "source": r.source})
    return rows


def _model(record: Mapping[str, Any]) -> str:
    """Its name if the record has one, with a fingerprint's first digits."""
    model, name = record["model"], record.get("name")
    short = model[:19] if model.startswith("sha256:") else model
    if name is None or name == model:
        return short
    return f"{'/'.join(Path(name).parts[-2:])} ({short})"  # of a path its end


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Read the runs, draw the figures, write the report; returns the Markdown file.

    Raises:
        FileNotFoundError, ValueError: see `load_runs`.
    """
    runs = load_runs(paths)
    found = figures(runs)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for figure in found:
        draw(figure, out / "figures" / f"{figure.key}.svg")
        data = json.dumps(dataclasses.asdict(figure), indent=1)
        (out / "figures" / f"{figure.key}.json").write_text(data + "\n", encoding="utf-8")
    (out / "report.html").write_text(_html(runs, found), encoding="utf-8")
    path = out / "report.md"
    path.write_text(_markdown(runs, found), encoding="utf-8")
    return path


def _environment(runs: Runs) -> list[str]:
    """Devices, versions and commits of the records, each once."""
    lines = dict.fromkeys(
        f"{r.record['device']} x {r.record['device_count']}, commit "
        f"{(r.record['commit'] or 'unknown')[:12]}, "
        + ", ".join(f"{k} {v}" for k, v in r.record["versions"].items() if v)
        for r in runs.records
    )
    return list(lines)


TITLE = "wide-jax report"
ABOUT = (
    "Skipped amounts are fractions of what routing could skip, computed from the masks of the "
    "tokens evaluated; `paper` is the unweighted mean of the attention and FFN rates, `bytes` what "
    "a decode step reads. G is an FFN group's size in channels, `heads` an attention group's in "
    "query heads; ± is one standard error. Every row and point names the file and line of its "
    "record; only records of the same task, metric and n are drawn together."
)


def _left_out(runs: Runs) -> list[str]:
    """What was found and is not shown."""
    counts = collections.Counter(r.record["suite"] for r in runs.records)
    other = [f"{suite} {count}" for suite, count in counts.items() if suite not in SHOWN]
    lines = []
    if other:
        lines.append(f"Records of suites that this report does not show: {', '.join(other)}")
    if runs.passed_over:
        lines.append(f"Files without result records: {', '.join(runs.passed_over)}")
    return lines


def _markdown(runs: Runs, found: Sequence[Figure]) -> str:
    lines = [f"# {TITLE}", "", ABOUT, ""]
    for title, rows in _tables(runs):
        lines += [f"## {title}", "", *_markdown_table(rows), ""]
    lines += ["## Figures", ""] if found else []
    for figure in found:
        lines += [f"### {figure.title}", "", f"![{figure.title}](figures/{figure.key}.svg)", ""]
        lines += [f"Points and sources: [{figure.key}.json](figures/{figure.key}.json)", ""]
    if environment := _environment(runs):
        lines += ["## Measured on", "", *(f"- {line}" for line in environment), ""]
    for line in _left_out(runs):
        lines += [line, ""]
    return "\n".join(lines)


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    head = list(rows[0])
    body = [
        "| " + " | ".join(row[name].replace("|", "\\|") for name in head) + " |" for row in rows
    ]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]


def _tables(runs: Runs) -> list[tuple[str, list[dict[str, str]]]]:
    names = [label(run.recipe) for run in runs.trained]
    tables = [
        ("Quality", eval_rows(runs.records)),
        ("Speed", other_rows(runs.records)),
        ("Training, on held-out text", training_rows(runs.trained, names)),
    ]
    return [(title, rows) for title, rows in tables if rows]


def _html(runs: Runs, found: Sequence[Figure]) -> str:
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
        "td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left;white-space:nowrap}"
        "img{max-width:100%}"
    )
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{TITLE}</title>",
        f"<style>{style}</style><h1>{TITLE}</h1><p>{html.escape(ABOUT)}</p>",
    ]
    for title, rows in _tables(runs):
        head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(v)}</td>" for v in row.values()) + "</tr>"
            for row in rows
        )
        parts.append(f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>")
    for figure in found:
        name, title = html.escape(figure.key), html.escape(figure.title)
        parts.append(f"<h3>{title}</h3><img src='figures/{name}.svg' alt='{title}'>")
        sources = "".join(
            f"<tr><td>{html.escape(s.name)}</td><td>{p.x:.4g}</td><td>{p.y:.4g}</td>"
            f"<td>{html.escape(p.source)}</td></tr>"
            for s in figure.series
            for p in s.points
        )
        parts.append(f"<p><a href='figures/{name}.json'>points and sources</a></p>")
        if sum(len(s.points) for s in figure.series) <= LISTED:
            parts[-1] = (
                "<details><summary>points and sources</summary><table><tr><th>series</th>"
                f"<th>x</th><th>y</th><th>record</th></tr>{sources}</table></details>"
            )
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in _environment(runs))
    if listed:
        parts.append(f"<h2>Measured on</h2><ul>{listed}</ul>")
    parts += [f"<p>{html.escape(line)}</p>" for line in _left_out(runs)]
    return "\n".join([*parts, "</html>", ""])
