"""Plots of an end-to-end benchmark's records.

`python -m eval.e2e_plots` draws those of the documents again, of the newest records in
`eval/results/`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import matplotlib.figure

from eval.e2e_runs import Phase
from eval.records import RESULTS, read_records

MODEL, DEVICE, TOKENS = "llama-3.1-8b-shape", "NVIDIA H200", 16_384  # of the documents


def write_plots(
    rows: Sequence[dict[str, Any]], folder: Path, *, tokens: int | None = None
) -> list[Path]:
    """Write `e2e_sparsity.png`, `e2e_length.png`, `e2e_group_size.png`; returns the paths.

    Args:
        rows: of a benchmark. Drawn are prefill and decode of one sequence; of a cell the last
            record, and by length the group size that was measured at most of them. Where there is
            nothing of one sequence, no plots.
        folder: where the plots go.
        tokens: the context of those by sparsity and by group size; None: the longest.
    """
    single = [row for row in rows if row["batch"] == 1 and row["phase"] in get_args(Phase)]
    if not single:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    tokens = max(row["tokens"] for row in single) if tokens is None else tokens
    at_tokens = [row for row in single if row["tokens"] == tokens]
    by_sparsity = _panels(
        at_tokens,
        x=lambda row: 100.0 * row["sparsity"],
        series=lambda row: f"{row['mask']} masks, groups of {row['ffn_group']}",
        label="(token, group) pairs skipped, %",
    )
    lengths = {(row["ffn_group"], row["tokens"]) for row in single}
    measured = [group for group, _ in lengths]
    group = max(sorted(set(measured)), key=measured.count)
    by_length = _panels(
        [row for row in single if row["ffn_group"] == group],
        x=lambda row: row["tokens"],
        series=_skipped,
        label=f"tokens of context, groups of {group}",
    )
    by_group = _panels(
        at_tokens, x=lambda row: row["ffn_group"], series=_skipped, label="channels per FFN group"
    )
    for figure in (by_length, by_group):
        for axes in figure.axes:
            axes.set_xscale("log", base=2)
    figures = {
        "e2e_sparsity.png": by_sparsity,
        "e2e_length.png": by_length,
        "e2e_group_size.png": by_group,
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in figures]


def _panels(
    rows: Sequence[dict[str, Any]],
    *,
    x: Callable[[dict[str, Any]], float],
    series: Callable[[dict[str, Any]], str],
    label: str,
) -> matplotlib.figure.Figure:
    """Speedup over the best dense by `x`, a panel a phase, a line a series; the ideal dotted."""
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure = matplotlib.figure.Figure(figsize=(5.0 * len(phases), 4.2), layout="constrained")
    panels = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    for axes, phase in zip(panels, phases, strict=True):
        wide = [row for row in rows if row["phase"] == phase and row["variant"] == "wide"]
        for name in dict.fromkeys(series(row) for row in wide):
            # A later record of the same cell replaces an earlier one.
            best = {x(row): row for row in wide if series(row) == name}
            xs = sorted(best)
            line = axes.plot(xs, [best[at]["speedup"] for at in xs], marker="o", label=name)
            ideal = [best[at]["ideal_speedup"] for at in xs]
            axes.plot(xs, ideal, linestyle=":", linewidth=1, color=line[0].get_color())
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(label)
        axes.set_title(f"{phase}, one sequence, {_contexts(wide)}")
        axes.grid(alpha=0.3)
        axes.legend(title="dotted: ideal", fontsize="small")
    panels[0].set_ylabel("times faster than the best dense")
    return figure


def _contexts(rows: Sequence[dict[str, Any]]) -> str:
    lengths = sorted({row["tokens"] for row in rows})
    return f"{lengths[0]:,} tokens" if len(lengths) == 1 else "by length"


def _skipped(row: dict[str, Any]) -> str:
    """Random masks are drawn to a multiple of 1 %; the rate that came out differs a little."""
    return f"{row['mask']}, {row['sparsity']:.0%} skipped"


def main(record: Path = RESULTS / "e2e.jsonl", out: Path = RESULTS) -> list[Path]:
    """Draw the plots of the documents' model, all its layers; returns the paths."""
    every = (found for _, found in read_records(record))
    rows = [r for r in every if (r["model"], r["device"]) == (MODEL, DEVICE)]
    whole = [row for row in rows if row["layers"] == max(row["layers"] for row in rows)]
    return write_plots(sorted(whole, key=lambda row: row["time"]), out, tokens=TOKENS)


if __name__ == "__main__":
    for path in main():
        print(f"wrote {path}")
