"""`wide bench kernels`: the pruned ops beside dense, ideal, gather-scatter and grouped GEMM.

One JSON line a measurement (suite `kernels`), a table on the terminal, and plots of the products.
The mask layout is timed by itself and charged to no op: the ops of a sublayer share it.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eval import kernels_beside as beside
from eval import records
from eval.kernel_cases import Case, Family, MaskKind, ProductCase, families
from eval.kernel_cases.attention import AttentionBench, AttentionCase
from eval.kernel_timing import Compiled, Timing, compile_all, time_interleaved
from pallas_kernels import dispatch
from pallas_kernels._common.device import current_device
from pallas_kernels._common.problem import AnyImplementation
from pallas_kernels._common.testing import relative_error


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
    # gather-scatter, grouped GEMM and Pallas too, at 50 % random, for these sizes
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

    for nbytes in beside.COPIES:
        keep(beside.copy_record(nbytes, config.rounds))
    found = families(config.ops).values()
    todo = [(family, case) for family in found for case in family.bench_cases(config)]
    layouts = any(isinstance(case, ProductCase) for _, case in todo)
    for groups in (8, 112, 224, 448) if layouts else ():
        for row in beside.layout_records(max(config.tokens), groups, config.rounds):
            keep(row)
        keep(beside.k_layout_record(max(config.tokens), groups, config.rounds))
    attention = any(isinstance(case, AttentionCase) for _, case in todo)
    for tokens in (1, *config.attention.prefill_tokens) if attention else ():
        for row in beside.rope_records(config.model, tokens, config.rounds):
            keep(row)
    with Progress(console=console) as progress:
        task = progress.add_task("kernels", total=len(todo))
        for _, alike in itertools.groupby(todo, lambda one: (one[0].case, one[1].batch)):
            contests = [contest(*one, config, device.capability) for one in alike]
            what = f"{contests[0].family.case} {contests[0].case.shape}"
            progress.update(task, description=what)
            for row in contest_records(contests, config, console):
                keep(row)
            progress.advance(task, len(contests))
    console.print(table(rows))
    if config.plots is not None:
        from eval.kernel_plots import op_names, write_plots

        for path in write_plots(rows, config.plots) if op_names(rows) else ():
            console.print(f"wrote {path}")
    return rows


@dataclasses.dataclass(frozen=True)
class Cell:
    """One sparsity and mask of a problem: what dispatch picks, and each kernel with its config."""

    sparsity: float
    kind: MaskKind
    mask: jax.Array
    layout: Any
    choice: dispatch.Choice
    kernels: dict[str, tuple[AnyImplementation, Any]]  # contender -> implementation and config


@dataclasses.dataclass(frozen=True)
class Contest:
    """One problem with its operands and all its cells."""

    family: Family
    case: Case
    operands: list[tuple[Any, ...]]
    cells: list[Cell]
    full_kernel: Any  # the config of the kernel that runs with every group on, as a baseline

    def naive(self, cell: Cell, config: BenchConfig) -> bool:
        """Whether the naive baselines run in this cell."""
        shape = self.case.shape
        sized = shape.get("m") in config.naive_tokens and shape["group"] in config.naive_groups
        return sized and cell.sparsity == 0.5 and cell.kind == "random"

    def functions(self, config: BenchConfig) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Dense without and with zeros, every kernel that a cell needs, and the specification."""
        found = {**self.case.dense(), "dense": self.case.pruned("dense")}
        for name, settings in itertools.chain(*(cell.kernels.items() for cell in self.cells)):
            found[name] = self.case.pruned(*settings)
        if self.full_kernel is not None:
            found[FULL] = self.case.pruned("triton", self.full_kernel)
        example = (*self.operands[0], self.cells[0].layout)
        functions = {name: (run, example) for name, run in found.items()}
        if self.case.checked(config):
            functions[REFERENCE] = (self.case.pruned("reference"), self.in_float32(self.cells[0]))
        return functions

    def in_float32(self, cell: Cell) -> tuple[Any, ...]:
        """The arguments of a cell that errors are measured with, in float32."""
        return (*(a.astype(jnp.float32) for a in self.operands[0]), cell.layout)


REFERENCE = "reference"  # compiled with the contenders, not timed
FULL = "triton, all on, unmasked"  # a baseline of `Case.own_baseline`
BASELINES = {"dense-unmasked": "the best plain JAX, unmasked"}  # in words, where a name is not


def contest(family: Family, case: Case, config: BenchConfig, capability: str) -> Contest:
    """The contest of one problem: every sparsity, every kind of mask, every kernel that runs."""
    cells = []
    names = dispatch.facts(case.facts.op).kernels(case.facts, capability)
    for s in config.sparsities:
        hinted = case.facts.hinted(s)
        choice = dispatch.choose(hinted)
        settings = {name: dispatch.config_for(hinted, kernel=name) for name in names}
        kernels = {f"{kernel} {c}": (kernel, c) for kernel, c in settings.items()}
        masks = {}  # where kinds of mask come out alike, the first of them
        for kind in config.masks:
            mask = case.mask(kind, s)
            masks.setdefault(mask.tobytes(), (kind, mask))
        cells += [
            Cell(s, kind, mask, case.layout(mask), choice, kernels) for kind, mask in masks.values()
        ]
    full = dispatch.config_for(case.facts.hinted(0.0)) if case.own_baseline else None
    return Contest(family, case, case.operands(), cells, full)


def contest_records(
    contests: list[Contest], config: BenchConfig, console: Console
) -> Iterator[dict[str, Any]]:
    """The records of several problems; all contenders are compiled together, first."""
    functions = {(i, n): f for i, c in enumerate(contests) for n, f in c.functions(config).items()}
    compiled, failed = compile_all(functions, workers=16)
    for (i, name), error in failed.items():
        raise RuntimeError(f"{contests[i].case}: {name} does not run") from error
    turns = {}
    naive = {}
    for i, one in enumerate(contests):
        for j, cell in enumerate(one.cells):
            calls = [one.case.arguments(operands, cell.layout) for operands in one.operands]
            for name in ("dense", *cell.kernels):
                turns[i, j, name] = (compiled[i, name], calls)
            unpruned = [(*operands, cell.layout) for operands in one.operands]
            for name in one.case.dense():
                turns[i, j, name] = (compiled[i, name], unpruned)
            if one.full_kernel is not None:
                full = one.case.layout(jnp.ones_like(cell.mask))
                calls = [(*operands, full) for operands in one.operands]
                turns[i, j, FULL] = (compiled[i, FULL], calls)
            if one.naive(cell, config):
                naive |= {(i, j, n): turn for n, turn in _naive(one, cell, console).items()}
    timings = time_interleaved(turns, config.rounds)
    if naive:
        timings |= time_interleaved(naive, min(config.rounds, 10))
        turns |= naive
    for i, one in enumerate(contests):
        for j, cell in enumerate(one.cells):
            own = {name: turn for (*at, name), turn in turns.items() if at == [i, j]}
            reference = compiled.get((i, REFERENCE))
            yield from _rows(one, cell, own, {n: timings[i, j, n] for n in own}, reference)


def _rows(
    one: Contest,
    cell: Cell,
    turns: dict[str, tuple[Compiled, list[tuple[Any, ...]]]],
    timings: dict[str, Timing],
    reference: Compiled | None,
) -> Iterator[dict[str, Any]]:
    """The records of one cell, with errors against float32 where there is a `reference`."""
    case, facts = one.case, one.case.facts
    expected = None
    if reference is not None and bool(cell.mask.any()):
        expected = reference.call(*one.in_float32(cell))
    unmasked = {*case.dense(), FULL} & turns.keys()
    best = min(unmasked, key=lambda name: timings[name].ms)
    dense_ms = timings[best].ms
    picked = "dense"
    if cell.choice.config is not None:
        picked = f"{cell.choice.implementation} {cell.choice.config}"
    kept = float(cell.mask.mean())
    for name, (contender, calls) in turns.items():
        implementation, settings = cell.kernels.get(name, (name, None))
        error = None
        if expected is not None and name not in unmasked:
            error = relative_error(contender.call(*calls[0]), expected)
        as_json = None
        if settings is not None:
            as_json = dispatch.facts(facts.op).config_to_json(settings)
        yield {
            "op": facts.op,
            "case": one.family.case,
            "shape": case.shape,
            "expected_sparsity": cell.sparsity,
            "dtype": facts.dtype,
            "sparsity": 1.0 - kept,
            "mask": cell.kind if cell.sparsity > 0.0 else "all_on",
            "implementation": implementation,
            "dispatched": name == picked,
            "config": as_json,
            "ms": timings[name].ms,
            "samples_ms": timings[name].samples_ms,
            "dense_ms": dense_ms,
            "dense": f"{BASELINES.get(best, best)}, in turns with the op",
            "ideal_ms": dense_ms * kept if case.compute_bound else None,
            "speedup": dense_ms / timings[name].ms,
            "includes_layout": False,
            "cold_l2": case.cold,
            "temporary_bytes": contender.temporary_bytes,
            "peak_bytes": contender.temporary_bytes + contender.output_bytes,
            "rel_error": error,
            **case.active(cell.mask),
        }


def _naive(one: Contest, cell: Cell, console: Console) -> dict[str, Any]:
    """The turns of other ways to skip a cell's pairs: naive ones, and our kernel in Pallas.

    The ones that do not fit are printed.
    """
    arguments = one.case.arguments(one.operands[0], cell.layout)
    ways = {**one.case.naive(cell.layout), "pallas": one.case.pruned("pallas")}
    functions = {name: (run, arguments) for name, run in ways.items()}
    compiled, failed = compile_all(functions, workers=2)
    for name, error in failed.items():
        console.print(f"  not run: {name} on {one.case}: {repr(error)[:200]}")
    return {name: (run, [arguments]) for name, run in compiled.items()}


def table(rows: list[dict[str, Any]]) -> Table:
    """What dispatch picked, one line a cell; of the shape what is not the model's."""
    out = Table(title="kernels, device time")
    for column in ("case", "shape", "sparsity", "mask", "runs"):
        out.add_column(column)
    for column in ("ms", "dense ms", "x", "TB/s"):
        out.add_column(column, justify="right")
    for row in rows:
        if not row.get("dispatched", True):
            continue
        own = {
            name: n for name, n in row["shape"].items() if name not in ("n", "k", "hq", "hk", "d")
        }
        shape = " ".join(f"{name}={size}" for name, size in own.items())
        cells = [row["case"], shape, f"{row['sparsity']:.2f}", row["mask"], row["implementation"]]
        cells.append(f"{row['ms']:.4f}")
        compared = "dense_ms" in row
        cells += [f"{row['dense_ms']:.4f}", f"{row['speedup']:.2f}"] if compared else ["", ""]
        out.add_row(*cells, f"{row['bytes'] / row['ms'] * 1e-9:.2f}")
    return out
