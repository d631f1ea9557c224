"""The roofline and the speedup plot of a kernel benchmark's records, and the plot of a table.

`python -m eval.kernel_plots` draws all three again, of the newest records in `eval/results/`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker

from eval import records
from eval.records import RESULTS
from pallas_kernels._common import tuned
from pallas_kernels._common.tuned import Entry, Table

MARKERS = "osD^vP*X"


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every cell the records of the last run that measured it; of copies all, for the roof."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["time"]):
        fields = ("op", "case", "shape", "dtype", "expected_sparsity", "mask")
        cell = cells.setdefault(str([row.get(field) for field in fields]), [])
        if cell and row["op"] != "copy" and row["time"] != cell[0]["time"]:
            cell.clear()
        cell.append(row)
    return [row for cell in cells.values() for row in cell]


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
        _group_axis(axes)
        axes.set_title(f"{op} ({case}), {longest:,} tokens, random masks")
        axes.grid(alpha=0.3)
    panel[0].set_ylabel("speedup over dense")
    _legend(figure, panel, "skipped\n(dotted:\nideal)")
    return figure


def table_figure(table: Table) -> matplotlib.figure.Figure:
    """Speedup of a measured table's winners by group size and token count, 50 % skipped."""
    timed = [e for e in table.entries if e.sparsity == 0.5 and e.ms and e.dense_ms]
    of_products = [e for e in timed if "m" in e.problem.shape]
    weights = list(dict.fromkeys(map(_weight, of_products)))
    colors = {m: f"C{i}" for i, m in enumerate(sorted({e.problem.shape["m"] for e in of_products}))}
    figure, panel = panels(len(weights))
    for axes, weight in zip(panel, weights, strict=True):
        speedups = [
            (e.problem.shape["m"], e.problem.shape["group"], (e.dense_ms or 0) / (e.ms or 1))
            for e in of_products
            if _weight(e) == weight
        ]
        for tokens in sorted({m for m, _, _ in speedups}):
            cells = sorted((group, speedup) for m, group, speedup in speedups if m == tokens)
            color = colors[tokens]
            axes.plot(*zip(*cells, strict=True), marker="o", color=color, label=f"{tokens:,}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.axhline(2.0, color="black", linewidth=0.8, linestyle=":")
        _group_axis(axes)
        axes.set_title(f"{weight}: what {table.device_kind} runs")
        axes.grid(alpha=0.3)
    panel[0].set_ylabel("speedup over dense, 50 % skipped")
    _legend(figure, panel, "tokens")
    return figure


def _legend(
    figure: matplotlib.figure.Figure, panel: Sequence[matplotlib.axes.Axes], title: str
) -> None:
    """One legend beside all panels, in the order of the fullest one's lines."""
    named = {}
    for axes in sorted(panel, key=lambda axes: len(axes.lines), reverse=True):
        handles, labels = axes.get_legend_handles_labels()
        named |= {n: h for n, h in zip(labels, handles, strict=True) if n not in named}
    figure.legend(named.values(), named.keys(), title=title, loc="outside right center")


def _group_axis(axes: matplotlib.axes.Axes) -> None:
    """Group sizes along x, as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.set_xlabel("channels per group")


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


def main(device_kind: str = "NVIDIA H200") -> list[Path]:
    """Draw the plots of the records of a device kind and of its table; returns the paths."""
    every = (record for _, record in records.read_records(RESULTS / "kernels.jsonl"))
    paths = write_plots(newest(r for r in every if r["device"] == device_kind), RESULTS)
    table = tuned.load(device_kind)
    if table is None:
        raise ValueError(f"no table of {device_kind!r} in pallas_kernels/tuned/")
    paths.append(RESULTS / "kernels_table.png")
    table_figure(table).savefig(paths[-1], dpi=130)
    return paths


if __name__ == "__main__":
    for path in main():
        print(f"wrote {path}")
