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
from eval.kernel_timing import compile_all, time_interleaved
from pallas_kernels._attention import tables
from pallas_kernels._attention.config import (
    AttentionConfig,
    DecodeConfig,
    FlashConfig,
    MosaicConfig,
    to_json,
)
from pallas_kernels._attention.dispatch import AttentionOp, default_config, kernels_for
from pallas_kernels._common.device import KNOWN_DEVICES, Device, current_device
from pallas_kernels._common.testing import relative_error
from pallas_kernels._common.tuned import file_name

MOSAIC = ((192, 2), (128, 2), (128, 3), (64, 4))
# wgmma (Hopper), and mma.sync before and after it: larger tiles spill there.
FLASH = ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 8, 2))
FLASH_MMA = ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 4, 3), (64, 32, 8, 2))
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
    for case in problems:
        done = {entry.key for entry in table.entries}
        missing = [s for s in sparsities if _key(case, s) not in done]
        if not missing:
            continue
        entries, failures = tune(case, missing, device, rounds)
        for name, reason in failures.items():
            console.print(f"  not run: {case} {name}: {reason}")
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


def tune(
    case: AttentionCase, sparsities: list[float], device: Device, rounds: int
) -> tuple[list[tables.AttentionEntry], dict[str, str]]:
    """Measure all candidates of one problem: the winners, and what could not run."""
    sets = case.operands()
    choices = {s: case.choice(case.mask("random", s)) for s in sparsities}
    example = (*sets[0], choices[sparsities[0]])
    configs = {str(config): config for config in candidates(case, device)}
    functions: dict[str, Any] = {f"plain {n}": (run, example) for n, run in case.dense().items()}
    functions["dense"] = (case.run("dense"), example)
    for name, config in configs.items():
        implementation = "mosaic" if isinstance(config, MosaicConfig) else "triton"
        functions[name] = (case.run(implementation, config), example)
    compiled, failures = compile_all(functions, workers=14)
    for required in functions.keys() - configs.keys():
        if required in failures:
            raise failures[required]
    entries = []
    for s in sparsities:
        expected = compiled["dense"].call(*sets[0], choices[s])
        for name in configs.keys() & compiled.keys():
            error = relative_error(compiled[name].call(*sets[0], choices[s]), expected)
            if not error < 1e-2:
                raise RuntimeError(f"{case}: {name} differs from dense by {error:.2g}")
        calls = [(*operands, choices[s]) for operands in sets]
        timings = time_interleaved({n: (c, calls) for n, c in compiled.items()}, rounds)
        plain = min(t.ms for n, t in timings.items() if n not in configs)
        best = min(configs.keys() & timings.keys(), key=lambda n: timings[n].ms)
        config = configs[best]
        winner = "mosaic" if isinstance(config, MosaicConfig) else "triton"
        fastest = timings["dense"].ms < timings[best].ms
        entries.append(
            tables.AttentionEntry(
                *_key(case, s),
                implementation="dense" if fastest else winner,
                config=config,
                ms=round(min(timings["dense"].ms, timings[best].ms), 5),
                dense_ms=round(plain, 5),
            )
        )
    return entries, {name: repr(error)[:160] for name, error in failures.items()}


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
