"""Attention's part of `wide tune`: measure every candidate here and write the card's own table.

Resumable like the products' part: a finished problem is written at once, and a second run with the
same versions measures what is missing. A candidate with a wrong result stops the run.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from eval import records
from eval.attention_problems import CASES, AttentionCase, decode_case, prefill_case
from eval.kernel_timing import Compiled, compile_all, time_interleaved
from pallas_kernels._attention import tables
from pallas_kernels._attention.config import (
    AttentionConfig,
    DecodeConfig,
    FlashConfig,
    MosaicConfig,
    to_json,
)
from pallas_kernels._attention.dispatch import (
    AttentionOp,
    default_config,
    implementation_of,
    kernels_for,
)
from pallas_kernels._common.device import KNOWN_DEVICES, Device, current_device
from pallas_kernels._common.testing import relative_error
from pallas_kernels._common.tuned import file_name

MOSAIC = ((192, 2), (128, 2), (64, 3))
# wgmma (Hopper), and mma.sync before and after it: larger tiles spill there.
FLASH = ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3))
FLASH_MMA = ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 4, 3), (64, 32, 8, 2))
AT_ONCE = 2  # problems compiled together: a stop in between loses no more
DECODE = ((256, 64, 4, 3), (512, 64, 4, 3), (1024, 64, 4, 3), (1024, 64, 4, 4), (1024, 32, 4, 4))
DECODE += ((2048, 64, 4, 3),)


@dataclasses.dataclass(frozen=True)
class AttentionTune:
    """Attention's problems: groups are counted in heads."""

    prefill_tokens: tuple[int, ...] = (128, 512, 2048, 16384)
    prefill_groups: tuple[int, ...] = (4,)
    decode: tuple[tuple[int, int], ...] = (
        (1, 4096),
        (1, 16384),
        (1, 131072),
        (16, 4096),
        (16, 16384),
    )
    """Rows, and slots a row."""
    decode_groups: tuple[int, ...] = (4,)
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.75)


def cases(ops: tuple[AttentionOp, ...], config: AttentionTune, model: str) -> list[AttentionCase]:
    """Every problem of the ops, prefill first."""
    found = []
    if "attention_prefill" in ops:
        for tokens, group in itertools.product(config.prefill_tokens, config.prefill_groups):
            found.append(prefill_case(tokens, group, model))
    if "attention_decode" in ops:
        for (b, s), group in itertools.product(config.decode, config.decode_groups):
            found.append(decode_case(b, s, group, model))
    return found


def tune_attention(
    problems: list[AttentionCase],
    out: Path,
    console: Console,
    *,
    sparsities: tuple[float, ...],
    rounds: int,
    again: bool,
) -> tables.AttentionTable:
    """Tune, print the winners, write the table to the folder `out` and return it.

    The file is `attention_<device kind>.json`, beside the products' (WIDE_TUNED_DIR reads both).
    Raises without a CUDA device.
    """
    device = current_device()
    if device.capability is None:
        raise RuntimeError(f"wide tune needs a CUDA device; this one is {device.kind}")
    path = out / (tables.PREFIX + file_name(device.kind))
    versions = {name: version or "-" for name, version in records.versions().items()}
    table = tables.AttentionTable(device.kind, device.capability, True, (), versions=versions)
    if path.is_file() and not again:
        found = tables.read(path.read_text())
        if found.versions == versions:
            table = found
        else:
            console.print(f"{path}: other versions ({found.versions}); tuning all of it again")
    out.mkdir(parents=True, exist_ok=True)
    done = {entry.key for entry in table.entries}
    missing = {case: tuple(s for s in sparsities if _key(case, s) not in done) for case in problems}
    todo = [case for case in problems if missing[case]]
    for some in itertools.batched(todo, AT_ONCE):
        trials = [trial(case, missing[case], device) for case in some]
        functions = {(i, n): f for i, one in enumerate(trials) for n, f in one.functions().items()}
        compiled, failures = compile_all(functions, workers=16)
        for (i, name), error in failures.items():
            if name not in trials[i].configs:
                raise error
            console.print(f"  not run: {trials[i].case} {name}: {repr(error)[:160]}")
        for i, one in enumerate(trials):
            runs = {name: run for (j, name), run in compiled.items() if i == j}
            entries = measure(one, runs, rounds)
            table = dataclasses.replace(table, entries=(*table.entries, *entries))
            tables.write(table, path)
            for entry in entries:
                console.print(_line(entry))
    console.print(f"{len(table.entries)} attention problems in {path}")
    return table


def candidates(case: AttentionCase, device: Device) -> list[AttentionConfig]:
    """The configs worth trying: kernels that run there, within the card's shared memory."""
    capability = device.capability or "8.0"
    found: list[AttentionConfig] = []
    if case.decode:
        found += [DecodeConfig(*shape) for shape in DECODE if shape[0] <= max(256, case.s)]
    else:
        if "mosaic" in kernels_for(case.facts, device):
            found += [MosaicConfig(*shape) for shape in MOSAIC]
        tiles = FLASH if capability.startswith("9.") else FLASH_MMA
        found += [FlashConfig(*shape) for shape in tiles]
    itemsize, limit = jnp.dtype(case.dtype).itemsize, device.shared_memory_per_block
    return [c for c in found if c.shared_memory_bytes(case.d, itemsize, capability) <= limit]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One problem with its operands, the masks to measure and the configs to try."""

    case: AttentionCase
    operands: list[tuple[Any, ...]]
    choices: dict[float, Any]  # sparsity -> what the op takes of its mask
    configs: dict[str, AttentionConfig]

    def functions(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Dense without and with zeros, and every candidate, with example arguments."""
        example = (*self.operands[0], next(iter(self.choices.values())))
        found = {f"plain {name}": run for name, run in self.case.dense().items()}
        found["dense"] = self.case.run("dense")
        for name, config in self.configs.items():
            found[name] = self.case.run(implementation_of(config), config)
        return {name: (run, example) for name, run in found.items()}


def trial(case: AttentionCase, sparsities: tuple[float, ...], device: Device) -> Trial:
    """The trial of one problem on a device."""
    choices = {s: case.choice(case.mask("random", s)) for s in sparsities}
    return Trial(case, case.operands(), choices, {str(c): c for c in candidates(case, device)})


def measure(one: Trial, compiled: dict[str, Compiled], rounds: int) -> list[tables.AttentionEntry]:
    """The winner at every sparsity. Raises `RuntimeError` on a kernel that disagrees with dense."""
    entries = []
    kernels = one.configs.keys() & compiled.keys()
    for s, choice in one.choices.items():
        calls = [(*operands, choice) for operands in one.operands]
        expected = compiled["dense"].call(*calls[0])
        for name in kernels:
            error = relative_error(compiled[name].call(*calls[0]), expected)
            if not error < 1e-2:
                raise RuntimeError(f"{one.case}: {name} differs from dense by {error:.2g}")
        timings = time_interleaved({n: (c, calls) for n, c in compiled.items()}, rounds)
        plain = min(t.ms for n, t in timings.items() if n not in one.configs)
        best = min(kernels, key=lambda n: timings[n].ms)
        dense_wins = timings["dense"].ms < timings[best].ms
        config = one.configs[best]
        entries.append(
            tables.AttentionEntry(
                *_key(one.case, s),
                implementation="dense" if dense_wins else implementation_of(config),
                config=config,
                ms=round(min(timings["dense"].ms, timings[best].ms), 5),
                dense_ms=round(plain, 5),
            )
        )
    return entries


def _key(case: AttentionCase, sparsity: float) -> tuple:
    shape = (case.b, case.t, case.s, case.hq, case.hk, case.d, case.group)
    return (case.op, case.dtype, *shape, sparsity)


def _line(entry: tables.AttentionEntry) -> str:
    speedup = (entry.dense_ms or 0) / (entry.ms or 1)
    return (
        f"  {entry.op} b={entry.b} t={entry.t} s={entry.s} sparsity={entry.sparsity:g}: "
        f"{entry.implementation} {entry.ms:.4f} ms, {speedup:.2f}x dense {to_json(entry.config)}"
    )


DERIVATION = (
    "Not measured. Prefill: time relative to cuDNN = (1 - sparsity) (1 + h) / 0.7 with "
    "h = block_m / (2 t (1 - sparsity)) for each group's last, partial tile (mma.sync flash "
    "attention through Triton, against cuDNN's own). Decode: bytes, (1 - sparsity) / 0.9 for one "
    "row; more rows read what their own masks need. Dense where that is above 0.98. Tiles: those "
    "that the compiler fits into registers and shared memory for heads of this size."
)


def derive(device: Device, config: AttentionTune, model: str) -> tables.AttentionTable:
    """The table of a card that nobody measured, from `DERIVATION`'s model."""
    entries = []
    for case in cases(tuple(CASES), config, model):
        for s in config.sparsities:
            chosen = default_config(case.facts, "triton", device)
            if isinstance(chosen, FlashConfig):
                partial = chosen.block_m / (2 * case.t * (1.0 - s))
                relative = (1.0 - s) * (1.0 + partial) / 0.7
            else:
                relative = (1.0 - s) / 0.9
            winner = "triton" if relative < 0.98 else "dense"
            entries.append(
                tables.AttentionEntry(*_key(case, s), implementation=winner, config=chosen)
            )
    capability = device.capability or ""
    return tables.AttentionTable(device.kind, capability, False, tuple(entries), model=DERIVATION)


def write_derived(out: Path, config: AttentionTune, model: str) -> list[Path]:
    """Write the tables of the known cards that are not measured; returns their paths."""
    paths = []
    for device in KNOWN_DEVICES:
        if device.kind != "NVIDIA H200":
            path = out / file_name(device.kind)
            tables.write(derive(device, config, model), path)
            paths.append(path)
    return paths
