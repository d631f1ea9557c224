"""`wide bench kernels`: the pruned ops beside dense, ideal, gather-scatter and grouped GEMM.

One JSON line a measurement (suite `kernels`), a table on the terminal, and plots. The mask layout
is timed by itself and charged to no op: the ops of a sublayer share it.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pallas_kernels
from eval import attention_bench, records
from eval.attention_bench import AttentionBench
from eval.attention_problems import CASES, split_ops
from eval.kernel_cases import Case, Family, MaskKind, make_mask
from eval.kernel_timing import Compiled, Timing, compile_all, time_interleaved
from pallas_kernels import dispatch
from pallas_kernels._common.config import Config, to_json
from pallas_kernels._common.device import current_device
from pallas_kernels._common.problem import SMALL_TOKENS
from pallas_kernels._common.testing import relative_error
from pallas_kernels.layout.api import LayoutImplementation, order_k_axis


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What `wide bench kernels` measures and where results go."""

    json: Path | None = None  # JSON lines are appended here
    plots: Path | None = None  # folder for the roofline and the speedup plot
    model: str = "llama-3.1-8b"
    ops: tuple[str, ...] = ()  # gemm_mn, swiglu_up, ...; none named: all
    tokens: tuple[int, ...] = (1, 8, 64, 512, 2048, 16384)
    groups: tuple[int, ...] = ()  # channels per group; none named: each op's own list
    sparsities: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    masks: tuple[MaskKind, ...] = ("random", "clustered")
    # gather-scatter and grouped GEMM too, at 50 % random, for these sizes
    naive_tokens: tuple[int, ...] = (512, 16384)
    naive_groups: tuple[int, ...] = (128, 512)
    error_tokens: int = 512  # errors against float32 are computed up to this many tokens
    rounds: int = 30
    attention: AttentionBench = dataclasses.field(default_factory=AttentionBench)


def main(config: BenchConfig) -> list[dict[str, Any]]:
    """Measure, print, write; returns the records. Raises without a GPU: nothing is simulated."""
    device = current_device()
    if device.capability is None:
        raise RuntimeError(f"wide bench kernels needs a CUDA device; this one is {device.kind}")
    console = Console()
    common = records.common_fields("kernels")
    common["commit"] = common["commit"] or os.environ.get("WIDE_COMMIT")
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        record = common | row
        rows.append(record)
        if config.json is not None:
            records.append_record(config.json, record)

    keep(copy_record(config.rounds))
    products, attention = split_ops(config.ops)
    for groups in (8, 112, 224, 448) if products else ():
        for row in layout_records(max(config.tokens), groups, config.rounds):
            keep(row)
        keep(k_layout_record(max(config.tokens), groups, config.rounds))
    shapes = [
        (family, m, config.groups or family.bench_groups)
        for family in products.values()
        for m in family.tokens or config.tokens
    ]
    cases = attention_bench.cases(attention, config.attention, config.model)
    measure = attention_bench.Measure(config.sparsities, config.masks, config.rounds)
    with Progress(console=console) as progress:
        task = progress.add_task("kernels", total=len(shapes) + len(cases))
        for family, m, groups in shapes:
            progress.update(task, description=f"{family.case} m={m}")
            contests = [contest(family, m, group, config) for group in groups]
            for row in contest_records(contests, config, console):
                keep(row)
            progress.advance(task)
        progress.update(task, description="attention")
        for row in attention_bench.attention_records(cases, config.attention, measure):
            keep(row)
        progress.advance(task, len(cases))
    console.print(table(rows))
    if cases:
        console.print(attention_bench.table(rows))
    if config.plots is not None and products:  # the plots are of products
        from eval.kernel_plots import write_plots

        for path in write_plots([r for r in rows if r["op"] not in CASES], config.plots):
            console.print(f"wrote {path}")
    return rows


def copy_record(rounds: int) -> dict[str, Any]:
    """The device's copy bandwidth, the ceiling of everything bound by memory."""
    nbytes = 256 << 20
    sources = [jnp.full(nbytes // 4, i, jnp.float32) for i in range(4)]
    compiled, failed = compile_all({"copy": (jnp.copy, (sources[0],))})
    if failed:
        raise failed["copy"]
    timing = time_interleaved({"copy": (compiled["copy"], [(s,) for s in sources])}, rounds)["copy"]
    return {
        "op": "copy",
        "case": "copy",
        "shape": {"bytes": nbytes},
        "dtype": "float32",
        "sparsity": 0.0,
        "mask": "none",
        "implementation": "xla",
        "ms": timing.ms,
        "samples_ms": timing.samples_ms,
        "bytes": 2 * nbytes,
        "flops": 0,
    }


def k_layout_record(m: int, groups: int, rounds: int) -> dict[str, Any]:
    """Time of the K-axis part of a layout, which `gemm_k` needs, as it is made by default."""
    mask = make_mask("random", m, groups, 0.5)
    count = mask.sum(axis=0, dtype=jnp.int32)

    def order(mask, count):
        found = order_k_axis(mask, count)
        return found.rows, found.tiles

    compiled, failed = compile_all({"order": (order, (mask, count))})
    if failed:
        raise failed["order"]
    timing = time_interleaved({"order": (compiled["order"], [(mask, count)])}, rounds)["order"]
    return {
        "op": "mask_layout",
        "case": "layout_k_axis",
        "shape": {"m": m, "groups": groups},
        "dtype": "bool",
        "sparsity": 0.5,
        "mask": "random",
        "implementation": pallas_kernels.layout.api.default_layout_implementation(m),
        "dispatched": True,
        "ms": timing.ms,
        "samples_ms": timing.samples_ms,
        "bytes": mask.size,
        "flops": 0,
    }


def layout_records(m: int, groups: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Time of `mask_layout` by every implementation that runs here."""
    mask = make_mask("random", m, groups, 0.5)
    functions: dict[str, Any] = {}
    names: tuple[LayoutImplementation, ...] = ("xla", "pallas", "triton")
    for name in names:

        def order(mask, name: LayoutImplementation = name):
            layout = pallas_kernels.mask_layout(mask, implementation=name)
            return layout.order, layout.count

        functions[name] = (order, (mask,))
    compiled, failed = compile_all(functions)
    if failed:
        raise next(iter(failed.values()))
    timings = time_interleaved({n: (c, [(mask,)]) for n, c in compiled.items()}, rounds)
    chosen = pallas_kernels.layout.api.default_layout_implementation(m)
    for name, timing in timings.items():
        yield {
            "op": "mask_layout",
            "case": "layout",
            "shape": {"m": m, "groups": groups},
            "dtype": "bool",
            "sparsity": 0.5,
            "mask": "random",
            "implementation": name,
            "dispatched": name == chosen,
            "ms": timing.ms,
            "samples_ms": timing.samples_ms,
            "bytes": mask.size * 5,
            "flops": 0,
        }


@dataclasses.dataclass(frozen=True)
class Cell:
    """One sparsity and mask of a problem: what dispatch picks for it, and the kernel's config."""

    sparsity: float
    kind: MaskKind
    choice: dispatch.Choice
    kernel: Config


@dataclasses.dataclass(frozen=True)
class Contest:
    """One problem with its operands and all its cells."""

    family: Family
    case: Case
    operands: list[tuple[Any, ...]]
    cells: list[Cell]
    layouts: list[Any]  # of the cells

    def naive(self, cell: Cell, config: BenchConfig) -> bool:
        """Whether the naive baselines run in this cell."""
        facts = self.case.facts
        sized = facts.m in config.naive_tokens and facts.group in config.naive_groups
        return sized and cell.sparsity == 0.5 and cell.kind == "random"

    def functions(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Dense without and with zeros, and every kernel that a cell needs."""
        found = {"dense": self.case.dense(), "dense+zeros": self.case.pruned("dense")}
        found |= {str(c.kernel): self.case.pruned("triton", c.kernel) for c in self.cells}
        example = (*self.operands[0], self.layouts[0])
        return {name: (run, example) for name, run in found.items()}


def contest(family: Family, m: int, group: int, config: BenchConfig) -> Contest:
    """The contest of one problem: every sparsity, every kind of mask."""
    case = family.make(m, group, config.model)
    cells = []
    for s in config.sparsities:
        hinted = dataclasses.replace(case.facts, expected_sparsity=s)
        choice, kernel = dispatch.choose(hinted), dispatch.config_for(hinted)
        kinds = config.masks[:1] if s == 0.0 else config.masks
        cells += [Cell(s, kind, choice, kernel) for kind in kinds]
    layouts = [
        pallas_kernels.mask_layout(make_mask(cell.kind, m, case.groups, cell.sparsity))
        for cell in cells
    ]
    return Contest(family, case, case.operands(), cells, layouts)


def contest_records(
    contests: list[Contest], config: BenchConfig, console: Console
) -> Iterator[dict[str, Any]]:
    """The records of several problems; all contenders are compiled together, first."""
    functions = {(i, n): f for i, c in enumerate(contests) for n, f in c.functions().items()}
    compiled, failed = compile_all(functions, workers=16)
    for (i, name), error in failed.items():
        raise RuntimeError(f"{contests[i].case}: {name} does not run") from error
    turns = {}
    for i, one in enumerate(contests):
        for j, (cell, layout) in enumerate(zip(one.cells, one.layouts, strict=True)):
            calls = [one.case.arguments(operands, layout) for operands in one.operands]
            for name in ("dense+zeros", str(cell.kernel)):
                turns[i, j, name] = (compiled[i, name], calls)
            unpruned = [(*operands, layout) for operands in one.operands]
            turns[i, j, "dense"] = (compiled[i, "dense"], unpruned)
    timings = time_interleaved(turns, config.rounds)
    naive = {}
    for i, one in enumerate(contests):
        for j, cell in enumerate(one.cells):
            if one.naive(cell, config):
                naive |= {(i, j, n): turn for n, turn in _naive(one, j, console).items()}
    if naive:
        timings |= time_interleaved(naive, min(config.rounds, 10))
        turns |= naive
    for i, one in enumerate(contests):
        own = {(j, name): turn for (k, j, name), turn in turns.items() if k == i}
        times = {(j, name): timings[i, j, name] for j, name in own}
        yield from _rows(one, own, times, config)


def _rows(
    one: Contest,
    turns: dict[tuple[int, str], tuple[Compiled, list[tuple[Any, ...]]]],
    timings: dict[tuple[int, str], Timing],
    config: BenchConfig,
) -> Iterator[dict[str, Any]]:
    """The records of one problem's cells, with errors for short inputs and random masks."""
    expected = {}
    if one.case.facts.m <= config.error_tokens:
        wide = tuple(a.astype(jnp.float32) for a in one.operands[0])
        for j, (cell, layout) in enumerate(zip(one.cells, one.layouts, strict=True)):
            if cell.kind == "random" and bool(layout.mask.any()):
                expected[j] = one.case.pruned("reference")(*wide, layout)
    for (j, name), (contender, calls) in turns.items():
        cell, kernel = one.cells[j], str(one.cells[j].kernel)
        dispatched = "dense+zeros" if cell.choice.implementation == "dense" else kernel
        row = _row(one, cell, one.layouts[j].mask, timings[j, name], timings[j, "dense"])
        named = {kernel: "triton", "dense+zeros": "dense", "dense": "dense-unmasked"}
        row["implementation"] = named.get(name, name)
        row["dispatched"] = name == dispatched
        row["config"] = to_json(cell.kernel) if name == kernel else None
        row["temporary_bytes"] = contender.temporary_bytes
        row["peak_bytes"] = contender.temporary_bytes + contender.output_bytes
        row["rel_error"] = None
        if j in expected and name != "dense":
            row["rel_error"] = relative_error(contender.call(*calls[0]), expected[j])
        yield row


def _naive(one: Contest, j: int, console: Console) -> dict[str, Any]:
    """The turns of the naive baselines for a cell's mask; the ones that do not fit are printed."""
    layout = one.layouts[j]
    arguments = one.case.arguments(one.operands[0], layout)
    functions = {name: (run, arguments) for name, run in one.case.naive(layout).items()}
    compiled, failed = compile_all(functions, workers=2)
    for name, error in failed.items():
        console.print(f"  not run: {name} on {one.case}: {repr(error)[:200]}")
    return {name: (run, [arguments]) for name, run in compiled.items()}


def _row(
    contest: Contest, cell: Cell, mask: jax.Array, timing: Timing, baseline: Timing
) -> dict[str, Any]:
    family, case, s = contest.family, contest.case, cell.sparsity
    kept = float(mask.mean())
    return {
        "op": case.facts.op,
        "case": family.case,
        "shape": case.shape,
        "expected_sparsity": s,
        "dtype": case.facts.dtype,
        "sparsity": 1.0 - kept,
        "mask": cell.kind if s > 0.0 else "all_on",
        "ms": timing.ms,
        "samples_ms": timing.samples_ms,
        "dense_ms": baseline.ms,
        "dense": "the best plain JAX, unmasked, in turns with the op",
        "ideal_ms": baseline.ms * kept if case.facts.m > SMALL_TOKENS else None,
        "speedup": baseline.ms / timing.ms,
        "includes_layout": False,
        "cold_l2": case.cold,
        **case.active(mask),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """What dispatch picked, one line a cell."""
    out = Table(title="pruned ops, device time")
    for column in ("op", "tokens", "group", "sparsity", "mask", "runs", "ms", "dense ms", "x"):
        out.add_column(column, justify="left" if column in ("op", "mask", "runs") else "right")
    for row in rows:
        if row["op"] in ("copy", "mask_layout"):
            shape = row["shape"]
            size = str(shape.get("groups", ""))
            tokens = str(shape.get("m", ""))
            name = row["implementation"]
            out.add_row(row["op"], tokens, size, "", "", name, f"{row['ms']:.4f}", "", "")
        elif row["op"] not in CASES and row["dispatched"]:
            shape = row["shape"]
            out.add_row(
                row["op"],
                str(shape["m"]),
                str(shape["group"]),
                f"{row['sparsity']:.2f}",
                row["mask"],
                row["implementation"],
                f"{row['ms']:.4f}",
                f"{row['dense_ms']:.4f}",
                f"{row['speedup']:.2f}",
            )
    return out
