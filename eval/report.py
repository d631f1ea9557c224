"""One report from run folders (`wide report RUNS... --out DIR`): tables, figures, their sources.

Reads the result records (`eval.records`) of every run and writes `report.md`, `report.html` and
`figures/`: one SVG a figure, and beside it a JSON file with every point and the file and line of
the record it came from. Nothing is measured or typed in here.
"""

import dataclasses
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.records import ACCOUNTING, FIELDS, check_record

LOWER_IS_BETTER = ("perplexity", "bits_per_byte")


@dataclasses.dataclass(frozen=True)
class Sourced:
    """A record and where it was read: `run/file.jsonl:line`."""

    record: Mapping[str, Any]
    source: str


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a figure."""

    x: int | float
    y: int | float
    source: str
    error: float | None = None  # standard error of y


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a figure, in order of x."""

    name: str
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a figure shows; drawing it needs nothing else."""

    key: str  # file name
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False


@dataclasses.dataclass(frozen=True)
class Runs:
    """Records of all runs, and the JSON lines files that hold none."""

    records: tuple[Sourced, ...]
    passed_over: tuple[str, ...]


def load_runs(paths: Sequence[Path]) -> Runs:
    """Every record of the runs: a folder's `*.jsonl` files (not deeper), or single files.

    Files whose first line has no `suite` (answers, samples, training metrics) are passed over and
    listed.

    Raises:
        FileNotFoundError: no such run.
        ValueError: a broken line in a file of records, or no records at all.
    """
    records: list[Sourced] = []
    passed_over: list[str] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no run at {path}")
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            name = f"{file.resolve().parent.name}/{file.name}"
            found = _records(file, name)
            if found is None:
                passed_over.append(name)
            else:
                records += found
    if not records:
        raise ValueError(f"no result records in {', '.join(map(str, paths))}")
    return Runs(tuple(records), tuple(passed_over))


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
    """A series name from a recipe: `wide, stage 1, G 64, separate 25 %`."""
    left = {key: value for key, value in recipe.items() if key not in set(without)}
    parts = [str(left.get("method", "?"))]
    if left.get("stage") is not None:
        parts.append(f"stage {left['stage']}")
    if left.get("ffn_group") is not None:
        parts.append(f"G {left['ffn_group']}")
    if left.get("budget") is not None:
        parts.append(str(left["budget"]))
    if left.get("target") is not None:
        parts.append(f"{100 * left['target']:g} %")
    return ", ".join(parts)


def figures(records: Sequence[Sourced]) -> list[Figure]:
    """Every figure the records are enough for."""
    evals = [r for r in records if r.record["suite"] == "eval"]
    found: list[Figure] = []
    for task, metric in dict.fromkeys((r.record["task"], r.record["metric"]) for r in evals):
        same = [r for r in evals if (r.record["task"], r.record["metric"]) == (task, metric)]
        found += [
            _quality_sparsity(task, metric, same),
            *_group_sizes(task, metric, same),
            *_quality_speed(task, metric, same, records),
        ]
    found += _allocation(evals)
    found += _layer_errors([r for r in records if r.record["suite"] == "errors"])
    return found


def _quality_sparsity(task: str, metric: str, records: Sequence[Sourced]) -> Figure:
    return Figure(
        key=_key("sparsity", task, metric),
        title=f"{task}: quality and sparsity",
        x_label="FLOPs skipped, of the routable ones",
        y_label=_unit(metric),
        series=_series(
            (label(r.record["recipe"], without=["target"]), r.record["accounting"]["flops"], r)
            for r in records
        ),
    )


def _group_sizes(task: str, metric: str, records: Sequence[Sourced]) -> list[Figure]:
    rows = [
        (label(r.record["recipe"], without=["ffn_group"]), r.record["recipe"]["ffn_group"], r)
        for r in records
        if r.record["recipe"].get("ffn_group") is not None
        and r.record["recipe"].get("method") == "wide"
    ]
    if len({x for _, x, _ in rows}) < 2:
        return []
    return [
        Figure(
            key=_key("groups", task, metric),
            title=f"{task}: FFN group size",
            x_label="FFN channels a group",
            y_label=_unit(metric),
            series=_series(rows),
            log_x=True,
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
            found.append(
                Figure(
                    key=_key(f"speed-{phase}", task, metric),
                    title=f"{task}: quality and measured {phase} speed",
                    x_label=f"measured {phase} speedup over the best dense",
                    y_label=_unit(metric),
                    series=_series_from(rows),
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
    return [Figure("allocation", "What each layer skips", "layer", "groups skipped", tuple(series))]


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
    return _series_from(
        (name, Point(x, r.record["value"], r.source, r.record["stderr"])) for name, x, r in rows
    )


def _series_from(rows: Iterable[tuple[str, Point]]) -> tuple[Series, ...]:
    lines: dict[str, list[Point]] = {}
    for name, point in rows:
        lines.setdefault(name, []).append(point)
    return tuple(
        Series(name, tuple(sorted(points, key=lambda p: p.x))) for name, points in lines.items()
    )


def _key(*parts: str) -> str:
    joined = "-".join(parts)
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in joined)


def _unit(metric: str) -> str:
    lower = any(name in metric for name in LOWER_IS_BETTER)
    return f"{metric} ({'lower' if lower else 'higher'} is better)"


def eval_rows(records: Sequence[Sourced]) -> list[dict[str, str]]:
    """The table of results: one row a record, the six figures of the accounting in each."""
    rows = []
    for r in records:
        if r.record["suite"] != "eval":
            continue
        record, error = r.record, r.record["stderr"]
        value = f"{record['value']:.4g}" + ("" if error is None else f" ± {error:.2g}")
        row = {
            "task": record["task"],
            "metric": record["metric"],
            "recipe": label(record["recipe"]),
            "seed": "" if record["seed"] is None else str(record["seed"]),
            "value": value,
            "n": f"{record['n']:,}",
        }
        row |= {name: f"{record['accounting'][name]:.1%}" for name in ACCOUNTING}
        rows.append(row | {"model": _short(record["model"]), "source": r.source})
    return rows


def other_rows(records: Sequence[Sourced]) -> list[dict[str, str]]:
    """Measured speeds: one row an end-to-end record."""
    names = ("model", "phase", "batch", "tokens", "sparsity", "mask", "variant")
    rows = []
    for r in records:
        if r.record["suite"] != "e2e":
            continue
        row = {name: str(r.record[name]) for name in names} | {"ms": f"{r.record['ms']:.4g}"}
        speedup = r.record.get("speedup")
        row["speedup"] = "" if speedup is None else f"{speedup:.2f}x"
        rows.append(row | {"model": _short(row["model"]), "source": r.source})
    return rows


def _short(model: str) -> str:
    """A fingerprint's first digits; names as they are."""
    return model[:19] if model.startswith("sha256:") else model


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Read the runs, draw the figures, write the report; returns the Markdown file.

    Raises:
        FileNotFoundError, ValueError: see `load_runs`.
    """
    runs = load_runs(paths)
    found = figures(runs.records)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for figure in found:
        draw(figure, out / "figures" / f"{figure.key}.svg")
        data = json.dumps(dataclasses.asdict(figure), indent=1)
        (out / "figures" / f"{figure.key}.json").write_text(data + "\n", encoding="utf-8")
    (out / "report.html").write_text(_html(runs, found), encoding="utf-8")
    path = out / "report.md"
    path.write_text(_markdown(runs, found), encoding="utf-8")
    return path


def draw(figure: Figure, path: Path) -> None:
    """Draw one figure as SVG; the same figure gives the same bytes. Needs the `eval` extra."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "wide-jax"}):
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(7, 4.2), layout="constrained")
        axes = canvas.subplots()
        for series in figure.series:
            x, y = [p.x for p in series.points], [p.y for p in series.points]
            bars = [p.error or 0.0 for p in series.points]
            axes.errorbar(x, y, yerr=bars, marker="o", markersize=4, capsize=2, label=series.name)
        if figure.log_x:
            axes.set_xscale("log", base=2)
        axes.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        canvas.savefig(path, metadata={"Date": None})


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
    "tokens evaluated; `paper` is the unweighted mean of the attention and FFN rates. Every row "
    "and point names the file and line of its record."
)


def _markdown(runs: Runs, found: Sequence[Figure]) -> str:
    lines = [f"# {TITLE}", "", ABOUT, ""]
    for title, rows in _tables(runs):
        lines += [f"## {title}", "", *_markdown_table(rows), ""]
    lines += ["## Figures", ""] if found else []
    for figure in found:
        lines += [f"### {figure.title}", "", f"![{figure.title}](figures/{figure.key}.svg)", ""]
        lines += [f"Points and sources: [{figure.key}.json](figures/{figure.key}.json)", ""]
    lines += ["## Measured on", "", *(f"- {line}" for line in _environment(runs)), ""]
    if runs.passed_over:
        lines += [f"Files without result records: {', '.join(runs.passed_over)}", ""]
    return "\n".join(lines)


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    head = list(rows[0])
    body = [
        "| " + " | ".join(row[name].replace("|", "\\|") for name in head) + " |" for row in rows
    ]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]


def _tables(runs: Runs) -> list[tuple[str, list[dict[str, str]]]]:
    tables = [("Quality", eval_rows(runs.records)), ("Speed", other_rows(runs.records))]
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
        parts.append(
            "<details><summary>points and sources</summary><table><tr><th>series</th><th>x</th>"
            f"<th>y</th><th>record</th></tr>{sources}</table></details>"
        )
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in _environment(runs))
    parts.append(f"<h2>Measured on</h2><ul>{listed}</ul>")
    if runs.passed_over:
        names = html.escape(", ".join(runs.passed_over))
        parts.append(f"<p>Files without result records: {names}</p>")
    return "\n".join([*parts, "</html>", ""])
