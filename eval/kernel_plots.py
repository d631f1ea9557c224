"""The roofline and the speedup plot of a kernel benchmark's records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure

from pallas_kernels._common.tuned import Entry, Table

MARKERS = "osD^vP*X"


def op_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The pruned products among the records, in order of appearance."""
    shapes = {row["op"]: row["shape"] for row in rows}
    return [op for op, shape in shapes.items() if {"m", "k"} <= shape.keys()]


def panels(count: int) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    """A figure with so many panels side by side."""
    figure = matplotlib.figure.Figure(figsize=(5.0 * count, 4.2), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes[0])


def write_plots(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `kernels_speedup.png` and `kernels_roofline.png`; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "kernels_speedup.png", folder / "kernels_roofline.png"]
    speedup_figure(rows).savefig(paths[0], dpi=130)
    roofline_figure(rows).savefig(paths[1], dpi=130)
    return paths


def speedup_figure(rows: Sequence[dict[str, Any]]) -> matplotlib.figure.Figure:
    """Speedup over dense by group size at the longest input, one line a sparsity."""
    ops = op_names(rows)
    products = [r for r in rows if r["op"] in ops and r["dispatched"]]
    cases = list(dict.fromkeys((r["op"], r["case"]) for r in products))
    figure, panel = panels(len(cases))
    for axes, (op, case) in zip(panel, cases, strict=True):
        longest = max(r["shape"]["m"] for r in products if r["case"] == case)
        for sparsity in sorted({r["expected_sparsity"] for r in products}):
            cells = sorted(
                (r["shape"]["group"], r["speedup"])
                for r in products
                if r["case"] == case
                and r["shape"]["m"] == longest
                and r["expected_sparsity"] == sparsity
                and r["mask"] in ("random", "all_on")
            )
            if cells:
                line = axes.plot(*zip(*cells, strict=True), marker="o", label=f"{sparsity:.0%}")
                if sparsity < 1.0:
                    ideal = 1.0 / (1.0 - sparsity)
                    axes.axhline(ideal, color=line[0].get_color(), linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("channels per group")
        axes.set_title(f"{op} ({case}), {longest:,} tokens, random masks")
        axes.grid(alpha=0.3)
        axes.legend(title="skipped (dotted: ideal)", fontsize=8)
        axes.set_ylabel("speedup over dense")
    return figure


def table_figure(table: Table) -> matplotlib.figure.Figure:
    """Speedup of a measured table's winners by group size and token count, 50 % skipped."""
    timed = [e for e in table.entries if e.sparsity == 0.5 and e.ms and e.dense_ms]
    weights = list(dict.fromkeys(_weight(e) for e in timed if "m" in e.problem.shape))
    figure, panel = panels(len(weights))
    for axes, weight in zip(panel, weights, strict=True):
        speedups = [
            (e.problem.shape["m"], e.problem.shape["group"], (e.dense_ms or 0) / (e.ms or 1))
            for e in timed
            if _weight(e) == weight
        ]
        for tokens in sorted({m for m, _, _ in speedups}):
            cells = sorted((group, speedup) for m, group, speedup in speedups if m == tokens)
            axes.plot(*zip(*cells, strict=True), marker="o", label=f"{tokens:,}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.axhline(2.0, color="black", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("channels per group")
        axes.set_ylabel("speedup over dense, 50 % skipped")
        axes.set_title(f"{weight}: what {table.device_kind} runs")
        axes.grid(alpha=0.3)
        axes.legend(title="tokens", fontsize=8)
    return figure


def _weight(entry: Entry) -> str:
    """A product of the table, by its weight: the same op serves several."""
    shape = entry.problem.shape
    return f"{entry.op} {shape.get('n')} x {shape.get('k')}"


def roofline_figure(rows: Sequence[dict[str, Any]]) -> matplotlib.figure.Figure:
    """FLOP/s of the active work over its FLOPs per byte, under the measured roof."""
    copies = [r for r in rows if r["op"] == "copy"]
    largest = max(r["bytes"] for r in copies)
    bandwidth = max(largest / r["ms"] for r in copies if r["bytes"] == largest) * 1e3
    ops = op_names(rows)
    every = [r for r in rows if r["op"] in ops]
    whole = [r for r in every if r["implementation"] == "dense-unmasked" and r["sparsity"] == 0.0]
    peak = max(r["flops"] / r["ms"] for r in whole) * 1e3
    figure = matplotlib.figure.Figure(figsize=(7, 4.8), layout="constrained")
    axes = figure.subplots()
    intensity = [0.3, peak / bandwidth, 2e4]
    axes.plot(intensity, [min(peak, bandwidth * i) / 1e12 for i in intensity], color="black")
    for op, marker in zip(ops, MARKERS, strict=False):
        cells = [r for r in every if r["op"] == op and r["dispatched"] and r["flops"]]
        axes.scatter(
            [r["flops"] / r["bytes"] for r in cells],
            [r["flops"] / r["ms"] * 1e3 / 1e12 for r in cells],
            c=[r["expected_sparsity"] for r in cells],
            cmap="viridis",
            vmin=0.0,
            vmax=1.0,
            marker=marker,
            s=18,
            label=op,
        )
    figure.colorbar(axes.collections[-1], label="skipped")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("active FLOPs per byte that must move")
    axes.set_ylabel("TFLOP/s of active work")
    axes.set_title(f"roof: {bandwidth / 1e12:.2f} TB/s copy, {peak / 1e12:.0f} TFLOP/s dense")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
