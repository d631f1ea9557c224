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

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import pallas_kernels
from eval import attention_tune, records
from eval.attention_problems import split_ops
from eval.attention_tune import AttentionTune
from eval.kernel_cases import Case, Family, make_mask
from eval.kernel_timing import Compiled, compile_all, time_interleaved
from pallas_kernels._common import tuned
from pallas_kernels._common.config import Config, to_json
from pallas_kernels._common.device import KNOWN_DEVICES, Device, current_device
from pallas_kernels._common.problem import SMALL_TOKENS
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
    if path.is_file() and not config.again:
        found = tuned.read(path.read_text())
        if found.versions == versions:
            table = found
        else:
            console.print(f"{path}: other versions ({found.versions}); tuning all of it again")
    config.out.mkdir(parents=True, exist_ok=True)

    cases = problems(config)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    refused = 0
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("tuning", total=len(cases))
        for _, alike in itertools.groupby(cases, lambda case: (case.facts.op, case.facts.m)):
            batch = list(alike)
            progress.update(task, description=f"{batch[0].facts.op} m={batch[0].facts.m}")
            done = {entry.key for entry in table.entries}
            trials = []
            for case in batch:
                missing = [s for s in config.sparsities if _dense_entry(case, s).key not in done]
                if missing:
                    trials.append(trial(case, missing, device))
                else:
                    progress.advance(task)
            for entries, failures in measure(trials, config.rounds):
                refused += len(failures)
                for candidate, reason in failures.items():
                    console.print(f"  not run: {candidate}: {reason}")
                table = dataclasses.replace(table, entries=(*table.entries, *entries))
                tuned.write(table, path)
                for entry in entries:
                    console.print(_line(entry))
                progress.advance(task)
    console.print(f"{len(table.entries)} problems in {path}; {refused} candidates could not run")
    if ops := split_ops(config.ops)[1]:
        attention_tune.tune_attention(
            attention_tune.cases(ops, config.attention, config.model),
            config.out,
            console,
            sparsities=config.attention.sparsities,
            rounds=config.rounds,
            again=config.again,
        )
    return table


def problems(config: TuneConfig) -> list[Case]:
    """Everything to tune, in order."""

    def of(family: Family) -> list[Case]:
        tokens = family.tokens or config.tokens
        groups = config.groups or family.tune_groups
        return [family.make(m, g, config.model) for m, g in itertools.product(tokens, groups)]

    return [case for family in split_ops(config.ops)[0].values() for case in of(family)]


def _dense_entry(case: Case, sparsity: float) -> tuned.Entry:
    """The table entry of a problem as if dense won: its key, and what a winner replaces."""
    f = case.facts
    return tuned.Entry(f.op, f.dtype, f.m, f.n, f.k, f.group, sparsity, "dense", None)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One problem with the configs that compete for it, and a layout a sparsity."""

    case: Case
    operands: list[tuple[Any, ...]]
    layouts: dict[float, Any]
    configs: dict[str, Config]

    def functions(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Everybody who takes part: dense with and without zeros, and the kernels."""
        example = (*self.operands[0], next(iter(self.layouts.values())))
        found = {"dense": self.case.pruned("dense"), "plain": self.case.dense()}
        found |= {n: self.case.pruned("triton", config) for n, config in self.configs.items()}
        return {name: (run, example) for name, run in found.items()}


def trial(case: Case, sparsities: list[float], device: Device) -> Trial:
    """The trial of a problem at the given sparsities: its operands, masks and candidates."""
    m = case.facts.m
    kind = "clustered" if 1 < m <= SMALL_TOKENS else "random"
    layouts = {}
    for s in sparsities:
        mask = make_mask(kind, m, case.groups, s)
        if m == 1 and s > 0:  # exactly the sparsity asked for
            mask = ((jnp.arange(case.groups) * s) % 1.0 < 1.0 - s)[None, :]
        layouts[s] = pallas_kernels.mask_layout(mask)
    configs = {str(config): config for config in case.candidates(device)}
    return Trial(case, case.operands(), layouts, configs)


def measure(trials: list[Trial], rounds: int) -> Iterator[tuple[list[tuned.Entry], dict[str, str]]]:
    """The winners of each trial, and what could not run.

    All contenders are compiled together and take turns together: one profile for all.
    """
    functions = {(i, n): f for i, t in enumerate(trials) for n, f in t.functions().items()}
    compiled, failures = compile_all(functions, workers=16)
    turns = {}
    for i, one in enumerate(trials):
        for name in ("dense", "plain"):
            if (i, name) in failures:
                raise failures[i, name]
        runs = {name: run for (j, name), run in compiled.items() if i == j}
        for s, layout in one.layouts.items():
            sets = [one.case.arguments(operands, layout) for operands in one.operands]
            _check(one.case, runs, one.configs, sets[0])
            turns |= {(i, s, name): (run, sets) for name, run in runs.items()}
            turns[i, s, "plain"] = (runs["plain"], [(*o, layout) for o in one.operands])
    timings = time_interleaved(turns, rounds) if turns else {}
    for i, one in enumerate(trials):
        entries = []
        for s in one.layouts:
            ms = {name: t.ms for (j, at, name), t in timings.items() if (j, at) == (i, s)}
            best = min((name for name in ms if name != "plain"), key=ms.__getitem__)
            fastest = min(one.configs.keys() & ms.keys(), key=ms.__getitem__, default=None)
            entries.append(
                dataclasses.replace(
                    _dense_entry(one.case, s),
                    implementation="dense" if best == "dense" else "triton",
                    config=None if fastest is None else one.configs[fastest],
                    ms=round(ms[best], 5),
                    dense_ms=round(min(ms["dense"], ms["plain"]), 5),
                )
            )
        failed = {name: error for (j, name), error in failures.items() if i == j}
        yield entries, {f"{one.case} {name}": repr(e)[:160] for name, e in failed.items()}


def _check(
    case: Case,
    compiled: dict[str, Compiled],
    configs: dict[str, Config],
    arguments: tuple[Any, ...],
) -> None:
    """Raise `RuntimeError` if a candidate disagrees with the dense product: never tune on junk."""
    expected = compiled["dense"].call(*arguments)
    for name in configs.keys() & compiled.keys():
        error = relative_error(compiled[name].call(*arguments), expected)
        if not error < 1e-2:
            raise RuntimeError(f"{case}: {name} differs from dense by {error:.2g}")


def _line(entry: tuned.Entry) -> str:
    speedup = (entry.dense_ms or 0) / (entry.ms or 1)
    config = "" if entry.config is None else to_json(entry.config)
    return (
        f"  {entry.op} m={entry.m} group={entry.group} sparsity={entry.sparsity:g}: "
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
)


def derive(device: Device, config: TuneConfig) -> tuned.Table:
    """The table of a card that nobody measured, from `DERIVATION`'s model."""
    entries = []
    for case, s in itertools.product(problems(config), config.sparsities):
        chosen = case.candidates(device)[0]
        faster = case.relative_time(chosen, s) < 0.98
        entries.append(
            dataclasses.replace(
                _dense_entry(case, s),
                implementation="triton" if faster else "dense",
                config=chosen,
            )
        )
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
