"""docs/study.md from the results: `python -m eval.study.document`.

The paragraphs are written by hand in a template; tables, figures and lists are put in where it says
`<!-- name -->`. Nothing is measured or typed in here, and a row without results is listed as such.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy.stats import binomtest, t

from eval.report import draw
from eval.study.expectations import expectations
from eval.study.figures import alike, figures, ordinary
from eval.study.findings import (
    Result,
    Results,
    Value,
    bootstrap,
    difference,
    planned,
    read,
    retention,
)
from eval.study.plan import GENERATION, TASKS, Recipe, Row, plan
from eval.study.settings import parts_of
from eval.study.trainings import PART

Z = 1.96  # of a 95 % interval
MARK = re.compile(r"^<!-- (\w+) -->$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Args:
    """Write the study's document and figures from its results."""

    record: Path = Path("eval/results/study.jsonl")
    template: Path = Path("docs/study.in.md")
    out: Path = Path("docs/study.md")
    """Figures go into a folder of the same name beside it."""


def interval(found: Value | None, digits: int = 2, scale: int = 1) -> str:
    """`12.3 ± 0.4`, the latter half a 95 % interval; nothing for no value."""
    if found is None:
        return ""
    text = _number(scale * found.value, digits)
    if found.stderr is None:
        return text
    return f"{text} ± {_number(scale * Z * found.stderr, digits)}"


def _number(value: float, digits: int) -> str:
    if abs(value) >= 10_000:
        return f"{value:.3g}"
    return f"{value:,.{max(0, digits - (abs(value) >= 1_000) - (abs(value) >= 100))}f}"


def table(results: Results, rows: Sequence[Row]) -> str:
    """The rows that have results: quality beside what was skipped for it."""
    dense = results.get("dense")
    dense_mean = None if dense is None else dense.mean()
    lines = [
        "| row | perplexity | times dense | mean of 7 tasks, % | of dense, % | FLOPs | attention | "
        "FFN | paper mean |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        result = results.get(row.id)
        if result is None or result.perplexity is None or result.accounting is None:
            continue
        times = ""
        if dense is not None and dense.perplexity is not None:
            times = f"{result.perplexity.value / dense.perplexity.value:,.2f}"
        mean, skipped = result.mean(), result.accounting
        cells = [
            f"`{row.id}`",
            perplexity_interval(result),
            times,
            interval(mean, 1, 100),
            interval(retention(mean, dense_mean), 1, 100),
            *(f"{100 * skipped[name]:.1f}" for name in ("flops", "attention", "ffn", "paper")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else NOTHING


NOTHING = "*Nothing of this has been run yet.*"


def task_table(results: Results, rows: Sequence[Row], part: str = "tasks") -> str:
    """Accuracy of every task, in %."""
    lines = [
        "| row | " + " | ".join(TASKS) + " | mean |",
        "|---" * (len(TASKS) + 2) + "|",
    ]
    for row in rows:
        result = results.get(row.id)
        if result is None or not any(result.task(task, part) for task in TASKS):
            continue
        cells = [interval(result.task(task, part), 1, 100) for task in TASKS]
        lines.append(
            f"| `{row.id}` | " + " | ".join([*cells, interval(result.mean(part), 1, 100)]) + " |"
        )
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def generation_table(results: Results) -> str:
    """GSM8K by its two ways of reading an answer, in %, with Wilson's intervals.

    They hold near 0 too, where a deviation says that nothing can be wrong.
    """
    lines = ["| row | metric | exact match, % |", "|---|---|---|"]
    for name, result in results.items():
        for (part, task, metric), record in result.records.items():
            if (part, task) == ("generation", GENERATION):
                right = binomtest(round(record["value"] * record["n"]), record["n"])
                low, high = right.proportion_ci(method="wilson")
                share = f"{100 * record['value']:.1f} ({100 * low:.1f} to {100 * high:.1f})"
                lines.append(f"| `{name}` | {metric} | {share} |")
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def seed_table(results: Results) -> str:
    """Rows that differ in nothing but the seed: the spread of their figures.

    Under them what two single trainings of WIDE may differ by through their seeds and a GPU's order
    of sums: t(0.975) sqrt(2) times the deviation about the rows' means that all of its runs have
    together.
    """
    squares, runs, freedom = 0.0, 0, 0
    groups: dict[str, list[Result]] = {}
    for result in results.values():
        if result.row.stage and result.perplexity is not None:
            same = dataclasses.replace(result.row, seed=0).id
            groups.setdefault(same, []).append(result)
    lines = [
        "| row | seeds | perplexities | mean loss, nats | deviation | means of 7 tasks, % |",
        "|---|---|---|---|---|---|",
    ]
    for name, members in groups.items():
        if len(members) < 2:
            continue
        members.sort(key=lambda r: r.row.seed or 0)
        losses = [r.loss.value for r in members if r.loss is not None]
        mean = sum(losses) / len(losses)
        about_mean = sum((x - mean) ** 2 for x in losses)
        spread = math.sqrt(about_mean / (len(losses) - 1))
        if members[0].row.method == "wide":
            squares, runs = squares + about_mean, runs + len(losses)
            freedom += len(losses) - 1
        seeds = ", ".join(str(r.row.seed) for r in members)
        listed = ", ".join(_number(math.exp(loss), 2) for loss in losses)
        means = [r.mean() for r in members]
        tasks = ", ".join("none" if m is None else _number(100 * m.value, 1) for m in means)
        lines.append(f"| `{name}` | {seeds} | {listed} | {mean:.3f} | {spread:.3f} | {tasks} |")
    if freedom:
        pooled = math.sqrt(squares / freedom)
        limit = t.ppf(0.975, freedom) * math.sqrt(2) * pooled
        lines += [
            "",
            f"The {runs} runs of `wide` together have a deviation of {pooled:.3f} nats about the "
            f"mean of their row, with {freedom} degrees of freedom: two single trainings of it "
            f"that differ by less than {limit:.2f} nats (95 %) may differ by chance alone.",
        ]
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def perplexity_interval(result: Result) -> str:
    """`21.8 (20.1 to 23.5)`: a 95 % interval by bootstrap over the windows."""
    found, losses = result.perplexity, result.window_losses
    if found is None or losses is None:
        return ""
    low, high = (_number(math.exp(bound), 2) for bound in bootstrap(losses))
    return f"{_number(found.value, 2)} ({low} to {high})"


def comparison_table(results: Results) -> str:
    """Pairs of rows of one target: whose loss is lower, window by window."""
    lines = [
        "| row | against | difference of loss, nats | FLOPs skipped, % |",
        "|---|---|---|---|",
    ]
    for result in results.values():
        for other in _rivals(result.row, results):
            found = difference(result, other)
            shares = [r.accounting for r in (result, other)]
            if found is None:
                continue
            skipped = [f"{100 * share['flops']:.1f}" for share in shares if share is not None]
            lines.append(
                f"| `{result.row.id}` | `{other.row.id}` | {found.value:+.3f} "
                f"({found.low:+.3f} to {found.high:+.3f}) | {' / '.join(skipped)} |"
            )
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def expectation_table(results: Results) -> str:
    """What the paper leads one to expect, and the figures of the rows that there are."""
    lines = ["| expected of WIDE | rows | what they say |", "|---|---|---|"]
    lines += ["| " + " | ".join(line) + " |" for line in expectations(results)]
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def _rivals(row: Row, results: Results) -> list[Result]:
    """What a WIDE row is compared with.

    An ordinary one with other methods, its own stage 1 and shorter runs of it; a distilled one with
    the row without.
    """
    if row.method != "wide":
        return []
    if not ordinary(row):
        plain = dataclasses.replace(row, distill="off")
        return [results[plain.id]] if ordinary(plain) and plain.id in results else []
    rivals = alike(row, results, ("depth", "static", "layer"))
    rivals += [
        other
        for other in results.values()
        if other.row.method == "threshold" and other.row.target == row.target
    ]
    if row.parent is not None and row.parent.id in results:
        rivals.append(results[row.parent.id])
    return rivals + [
        other
        for other in results.values()
        if ordinary(other.row)
        and (other.row.method, other.row.target, other.row.stage) == ("wide", row.target, row.stage)
        and (other.row.updates or 0) < (row.updates or 0)
    ]


def errors_table(results: Results) -> str:
    """Distance from the dense model: mean over layers of each sublayer's, and the stream's end."""
    lines = [
        "| row | attention, mean | FFN, mean | stream at a third | at two thirds | at the end | "
        "cosine at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        found = result.part("errors")
        if found is None:
            continue
        errors, stream = found["errors"], found["errors"]["stream"]
        means = [sum(errors[part]) / len(errors[part]) for part in ("attention", "ffn")]
        places = [stream[len(stream) * third // 3 - 1] for third in (1, 2, 3)]
        cells = [f"{value:.3f}" for value in (*means, *places, found["cosines"]["stream"][-1])]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def training_table(results: Results) -> str:
    """How trainings went, by method and stage: gradient norms of the second half of each run."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in results.values():
        if (log := result.part(PART)) is not None:
            groups.setdefault((result.row.method, result.row.stage), []).append(log)
    lines = [
        "| method | stage | runs | gradient norm, median | largest | last loss, nats |",
        "|---|---|---|---|---|---|",
    ]
    for (method, stage), logs in sorted(groups.items()):
        norms = [log["log"]["gradient_norm"] for log in logs]
        late = np.concatenate([np.asarray(norm)[len(norm) // 2 :] for norm in norms])
        low, high = (bound(log["value"] for log in logs) for bound in (min, max))
        lines.append(
            f"| `{method}` | {stage} | {len(logs)} | {_number(float(np.median(late)), 1)} | "
            f"{_number(float(late.max()), 1)} | {low:.2f} to {high:.2f} |"
        )
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def savings_table(results: Results) -> str:
    """The baseline without training: what its masks skip, and what it could really save."""
    lines = [
        "| row | perplexity | FLOPs skipped, % | FLOPs it can save, % |",
        "|---|---|---|---|",
    ]
    for name, result in results.items():
        found = result.part("perplexity")
        if found is not None and found.get("savable_flops") is not None:
            skipped = 100 * found["accounting"]["flops"]
            lines.append(
                f"| `{name}` | {perplexity_interval(result)} | {skipped:.1f} | "
                f"{100 * found['savable_flops']:.1f} |"
            )
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def speed_table(results: Results) -> str:
    """How much faster than the best dense a row's masks run, and as many skipped at random."""
    lines = [
        "| row | shape | phase, tokens | FFN group | attention, FFN skipped, % | ms | dense, ms | "
        "x | ideal | x at random |",
        "|---" * 10 + "|",
    ]
    for name, result in results.items():
        for (part, shape, _), record in result.records.items():
            if part != "speed":
                continue
            random = {
                one["phase"]: one["speedup"]
                for one in record["speeds"]
                if one["mask"] == "random_same_rates"
            }
            for one in record["speeds"]:
                if one["mask"] == "random_same_rates":
                    continue
                beside = random.get(one["phase"])
                cells = [
                    *(f"`{name}`", shape, f"{one['phase']}, {one['tokens']:,}"),
                    str(one.get("ffn_group") or result.row.ffn_group),
                    " / ".join(f"{100 * one['accounting'][m]:.1f}" for m in ("attention", "ffn")),
                    *(f"{one['ms']:.3f}", f"{one['dense_ms']:.3f} ({one['dense']})"),
                    *(f"{one['speedup']:.2f}", f"{one['ideal_speedup']:.2f}"),
                    "" if beside is None else f"{beside:.2f}",
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def not_run(results: Results) -> str:
    """Every row with a part that has no result, or not all of it.

    Of the plans of the lengths that have been begun, or of the default length.
    """
    first = (result.row for result in results.values() if result.row.wave == 1)
    lengths = sorted({row.updates for row in first if row.updates is not None})
    recipes = [Recipe(updates=length) for length in lengths] or [Recipe()]
    lines = []
    for row in {row.id: row for recipe in recipes for row in plan(recipe)}.values():
        known = results.get(row.id)
        left = [part for part in parts_of(row) if known is None or not known.has(part)]
        if left:
            lines.append(f"- `{row.id}`: {', '.join(left)}")
    return "\n".join(lines) if lines else "Every row of the plan has been run."


def measured_on(results: Results) -> str:
    """Devices, versions, commits and settings of the records, each once."""
    lines: dict[str, None] = {}
    for result in results.values():
        for r in result.records.values():
            versions = ", ".join(f"{k} {v}" for k, v in r["versions"].items() if v)
            where = f"{r['device']} x {r['device_count']}, commit {(r['commit'] or 'unknown')[:12]}"
            lines[f"- {where}, {versions}; {json.dumps(r['settings'])}"] = None
    return "\n".join(lines) if lines else NOTHING


SECTIONS = {  # waves of the plan
    "headline": (1, 2),
    "groups": (3,),
    "budgets": (4,),
    "heads": (5,),
    "targets": (6,),
    "distillation": (7,),
    "long": (9,),
}


def section(results: Results, rows: Sequence[Row], waves: Sequence[int]) -> str:
    """The table of some waves; after the first ones, beside dense and the headline WIDE rows."""
    own = [row for row in rows if row.wave in waves]
    if not any(row.id in results for row in own):
        return NOTHING
    beside = [row for row in rows if row.wave == 1 and row.method in ("dense", "wide")]
    return table(results, [*(row for row in beside if row not in own), *own])


def render(template: str, results: Results, drawn: Mapping[str, str]) -> str:
    """The document: the template with its marks filled in.

    Args:
        template: with marks `<!-- name -->` on lines of their own.
        results: by row id.
        drawn: figures by key, each as Markdown.

    Raises:
        ValueError: a mark that nothing belongs to.
    """
    rows = planned(r for result in results.values() for r in result.records.values())
    blocks: dict[str, str] = {
        name: section(results, rows, waves) for name, waves in SECTIONS.items()
    }
    first = [row for row in rows if row.wave <= 2]
    blocks |= {
        "generated": "<!-- Made by python -m eval.study.document: edit docs/study.in.md. -->",
        "task_table": task_table(results, first),
        "whole_task_table": task_table(results, rows, "whole_tasks"),
        "generation": generation_table(results),
        "seeds": seed_table(results),
        "savings": savings_table(results),
        "trainings": training_table(results),
        "comparisons": comparison_table(results),
        "expected": expectation_table(results),
        "errors": errors_table(results),
        "speed": speed_table(results),
        "not_run": not_run(results),
        "measured_on": measured_on(results),
    }
    keys = ("loss", "tasks", "groups", "allocation", "errors")
    blocks |= {f"figure_{key}": drawn.get(key, NOTHING) for key in keys}

    def fill(mark: re.Match[str]) -> str:
        if mark[1] not in blocks:
            raise ValueError(f"the template asks for {mark[1]!r}; there are {', '.join(blocks)}")
        return blocks[mark[1]]

    return MARK.sub(fill, template)


def main(args: Args) -> None:
    """Read, draw, write."""
    results = read(args.record)
    folder = args.out.with_suffix("")
    drawn = {}
    for figure in figures(results):
        folder.mkdir(parents=True, exist_ok=True)
        draw(figure, folder / f"{figure.key}.svg")
        drawn[figure.key] = f"![{figure.title}]({folder.name}/{figure.key}.svg)"
    text = render(args.template.read_text(encoding="utf-8"), results, drawn)
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
