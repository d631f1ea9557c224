"""Plots of an end-to-end benchmark's records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure


def write_plots(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `e2e_length.png` and `e2e_group_size.png`; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "e2e_length.png": _figure(rows, "tokens", "tokens of context", {"batch": 1}),
        "e2e_group_size.png": _figure(
            rows,
            "ffn_group",
            "channels per FFN group",
            {"batch": 1, "tokens": max(row["tokens"] for row in rows)},
        ),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / name)
        figure.savefig(paths[-1], dpi=130)
    return paths


def _figure(
    rows: Sequence[dict[str, Any]], by: str, label: str, only: dict[str, int]
) -> matplotlib.figure.Figure:
    """Speedup over the best dense, a panel a phase, a line a sparsity; the ideal dotted."""
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure = matplotlib.figure.Figure(figsize=(5.0 * len(phases), 4.2), layout="constrained")
    panels = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    for axes, phase in zip(panels, phases, strict=True):
        wide = [
            row
            for row in rows
            if row["phase"] == phase
            and row["variant"] == "wide"
            and all(row[key] == value for key, value in only.items())
        ]
        for mask in dict.fromkeys((row["mask"], _target(row)) for row in wide):
            _line(axes, [row for row in wide if (row["mask"], _target(row)) == mask], by)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.set_title(f"{phase}, one sequence")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("times faster than the best dense")
    panels[0].legend(title="skipped")
    return figure


def _target(row: dict[str, Any]) -> float:
    """Random masks are drawn to a multiple of 1 %; the rate that came out differs a little."""
    return round(row["sparsity"], 2)


def _line(axes: matplotlib.axes.Axes, rows: Sequence[dict[str, Any]], by: str) -> None:
    best: dict[int, dict[str, Any]] = {}  # a later record of the same cell replaces an earlier one
    for row in rows:
        best[row[by]] = row
    xs = sorted(best)
    label = f"{rows[0]['mask']} {rows[0]['sparsity']:.0%}"
    line = axes.plot(xs, [best[x]["speedup"] for x in xs], marker="o", label=label)
    ideal = [best[x]["ideal_speedup"] for x in xs]
    axes.plot(xs, ideal, linestyle=":", linewidth=1, color=line[0].get_color())
