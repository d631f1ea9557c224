"""`wide tune`: measure every candidate on this card and write its table of winners.

Resumable: every finished problem is written at once, and a second run with the same versions only
measures what is missing. Candidates that do not fit, compile or launch are counted and printed,
and candidates with a wrong result stop the run.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eval import records
from eval.kernel_cases import Case, families
from eval.kernel_cases.attention import AttentionTune
from eval.kernel_timing import Compiled, compile_all, time_interleaved
from pallas_kernels._common import tuned
from pallas_kernels._common.device import KNOWN_DEVICES, Device, current_device
from pallas_kernels._common.problem import facts
from pallas_kernels._common.testing import relative_error


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """What `wide tune` measures, and where it writes the table."""

    out: Path  # a folder; the file is named after the device kind (WIDE_TUNED_DIR reads it)
    model: str = "llama-3.1-8b"
    ops: tuple[str, ...] = ()  # gemm_mn, swiglu_up, ...; none named: all
    tokens: tuple[int, ...] = (1, 8, 64, 512, 2048, 16384)
    groups: tuple[int, ...] = ()  # channels per group; none named: each op's own list
    sparsities: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    rounds: int = 12
    again: bool = False  # measure also what the table already has
    attention: AttentionTune = dataclasses.field(default_factory=AttentionTune)


def main(config: TuneConfig) -> tuned.Table:
    """Tune, print the winners, write and return the table. Raises on a card without a GPU."""
    device = current_device()
    if device.capability is None:
        raise RuntimeError(f"wide tune needs a CUDA device; this one is {device.kind}")
    console = Console()
    path = config.out / tuned.file_name(device.kind)
    versions = {name: version or "-" for name, version in records.versions().items()}
    table = tuned.Table(device.kind, device.capability, True, (), versions=versions)
    if path.is_file():
        found = tuned.read(path.read_text())
        if found.versions == versions:
            table = found
        else:
            console.print(f"{path}: other versions ({found.versions}); tuning all of it again")
    config.out.mkdir(parents=True, exist_ok=True)

    todo = problems(config)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    refused = 0
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("tuning", total=len(todo))
        for _, alike in itertools.groupby(todo, lambda one: one[0].batch):
            batch = list(alike)
            name = " ".join(str(part) for part in batch[0][0].batch)
            progress.update(task, description=name)
            done = () if config.again else {entry.key for entry in table.entries}
            trials = []
            for case, sparsities in batch:
                missing = [s for s in sparsities if _dense_entry(case, s).key not in done]
                if missing:
                    trials.append(trial(case, missing, device))
                else:
                    progress.advance(task)
            for entries, failures in measure(trials, config.rounds):
                refused += len(failures)
                for candidate, reason in failures.items():
                    console.print(f"  not run: {candidate}: {reason}")
                new = {entry.key: entry for entry in entries}
                kept = {entry.key: entry for entry in table.entries}
                table = dataclasses.replace(table, entries=tuple((kept | new).values()))
                tuned.write(table, path)
                for entry in entries:
                    console.print(_line(entry))
                progress.advance(task)
    console.print(f"{len(table.entries)} problems in {path}; {refused} candidates could not run")
    return table


def problems(config: TuneConfig) -> list[tuple[Case, tuple[float, ...]]]:
    """Everything to tune, in order, with its sparsities."""
    return [one for family in families(config.ops).values() for one in family.tune_cases(config)]


def _dense_entry(case: Case, sparsity: float) -> tuned.Entry:
    """The table entry of a problem as if dense won: its key, and what a winner replaces."""
    return tuned.Entry(case.facts.hinted(sparsity), "dense", None)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One problem with the configs that compete for it, and a layout a sparsity."""

    case: Case
    operands: list[tuple[Any, ...]]
    layouts: dict[float, Any]
    configs: dict[str, Any]

    def functions(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Everybody who takes part: dense with and without zeros, and the kernels."""
        example = (*self.operands[0], next(iter(self.layouts.values())))
        kernel_of = facts(self.case.facts.op).kernel_of
        found = {"dense": self.case.pruned("dense"), **self.case.dense()}
        found |= {n: self.case.pruned(kernel_of(c), c) for n, c in self.configs.items()}
        return {name: (run, example) for name, run in found.items()}


def trial(case: Case, sparsities: list[float], device: Device) -> Trial:
    """The trial of a problem at the given sparsities: its operands, masks and candidates."""
    layouts = {s: case.layout(case.tuning_mask(s)) for s in sparsities}
    configs = {str(config): config for config in case.candidates(device)}
    return Trial(case, case.operands(), layouts, configs)


def measure(trials: list[Trial], rounds: int) -> Iterator[tuple[list[tuned.Entry], dict[str, str]]]:
    """The winners of each trial, and what could not run.

    All contenders are compiled together and take turns together: one profile for all.
    """
    functions = {(i, n): f for i, t in enumerate(trials) for n, f in t.functions().items()}
    compiled, failures = compile_all(functions, workers=16)
    for (i, name), error in failures.items():
        if name not in trials[i].configs:
            raise error
    turns = {}
    for i, one in enumerate(trials):
        runs = {name: run for (j, name), run in compiled.items() if i == j}
        for s, layout in one.layouts.items():
            sets = [one.case.arguments(operands, layout) for operands in one.operands]
            _check(one, runs, sets[0])
            turns |= {(i, s, name): (run, sets) for name, run in runs.items()}
            unpruned = [(*operands, layout) for operands in one.operands]
            turns |= {(i, s, name): (runs[name], unpruned) for name in one.case.dense()}
    timings = time_interleaved(turns, rounds) if turns else {}
    for i, one in enumerate(trials):
        entries = []
        kernel_of = facts(one.case.facts.op).kernel_of
        for s in one.layouts:
            ms = {name: t.ms for (j, at, name), t in timings.items() if (j, at) == (i, s)}
            fastest = min(one.configs.keys() & ms.keys(), key=ms.__getitem__, default=None)
            config = None if fastest is None else one.configs[fastest]
            dense_wins = fastest is None or ms["dense"] <= ms[fastest]
            entries.append(
                dataclasses.replace(
                    _dense_entry(one.case, s),
                    implementation="dense" if dense_wins else kernel_of(config),
                    config=config,
                    ms=round(ms["dense"] if dense_wins else ms[fastest], 5),
                    dense_ms=round(min(ms[name] for name in ("dense", *one.case.dense())), 5),
                )
            )
        failed = {name: error for (j, name), error in failures.items() if i == j}
        yield entries, {f"{one.case} {name}": repr(e)[:160] for name, e in failed.items()}


def _check(one: Trial, compiled: dict[str, Compiled], arguments: tuple[Any, ...]) -> None:
    """Raise `RuntimeError` if a candidate disagrees with the dense op: never tune on junk."""
    expected = compiled["dense"].call(*arguments)
    for name in one.configs.keys() & compiled.keys():
        error = relative_error(compiled[name].call(*arguments), expected)
        if not error < 1e-2:
            raise RuntimeError(f"{one.case}: {name} differs from dense by {error:.2g}")


def _line(entry: tuned.Entry) -> str:
    speedup = (entry.dense_ms or 0) / (entry.ms or 1)
    shape = " ".join(f"{name}={size}" for name, size in entry.problem.shape.items())
    config = "" if entry.config is None else facts(entry.op).config_to_json(entry.config)
    return (
        f"  {entry.op} {shape} sparsity={entry.sparsity:g}: "
        f"{entry.implementation} {entry.ms:.4f} ms, {speedup:.2f}x dense {config}"
    )


DERIVATION = (
    "Not measured. Time of a kernel relative to the dense product = (1 - sparsity) (1 + h) / e: "
    "h = block_m / (2 m (1 - sparsity)) for the group's last, partial tile; e = 0.85 of the dense "
    "product's rate for tiles of 128 columns (mma.sync with cp.async runs both), 0.65 for 64, 0.45 "
    "for 32, 0.25 for 16. Up to 64 tokens time is bytes of weights: (1 - sparsity) / 0.9, where a "
    "group counts as needed if any of m tokens with independent masks needs it. Dense where that "
    "is above 0.98. Tiles: the widest that fits the card's shared memory. Input-pruned products "
    "(gemm_k): (1.05 / 0.85) of the groups that a tile of 128 tokens computes, where bits of a "
    "pattern that tokens are too few to tell apart count as on, plus 200 / k for every partial sum."
    " Prefill: time relative to cuDNN = (1 - sparsity) (1 + h) / 0.7 with "
    "h = block_m / (2 t (1 - sparsity)) for each group's last, partial tile (mma.sync flash "
    "attention through Triton, against cuDNN's own). Decode: bytes, (1 - sparsity) / 0.9 for one "
    "row; more rows read what their own masks need. Dense where that is above 0.98. Tiles: those "
    "that the compiler fits into registers and shared memory for heads of this size."
)


def derive(device: Device, config: TuneConfig) -> tuned.Table:
    """The table of a card that nobody measured, from `DERIVATION`'s model."""
    entries = []
    for case, sparsities in problems(config):
        chosen = case.candidates(device)[0]
        kernel = facts(case.facts.op).kernel_of(chosen)
        for s in sparsities:
            winner = kernel if case.relative_time(chosen, s) < 0.98 else "dense"
            entry = _dense_entry(case, s)
            entries.append(dataclasses.replace(entry, implementation=winner, config=chosen))
    capability = device.capability or ""
    return tuned.Table(device.kind, capability, False, tuple(entries), model=DERIVATION)


def write_derived(config: TuneConfig) -> list[Path]:
    """Write the tables of the known cards that are not measured; returns their paths."""
    paths = []
    for device in KNOWN_DEVICES:
        if device.kind != "NVIDIA H200":
            path = config.out / tuned.file_name(device.kind)
            tuned.write(derive(device, config), path)
            paths.append(path)
    return paths
