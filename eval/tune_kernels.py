"""`wide tune`: measure every candidate on this card and write its table of winners.

Resumable: every finished problem is written at once, and a second run with the same versions only
measures what is missing. Candidates that do not fit, compile or launch are counted and printed,
and candidates with a wrong result stop the run.
"""

import dataclasses
import itertools
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import pallas_kernels
from eval import records
from eval.kernel_problems import MATRICES, OpName, Product, dense, make_mask, operands, product
from eval.kernel_problems import pruned as pruned_op
from eval.kernel_timing import Compiled, compile_all, time_interleaved
from pallas_kernels._common import tuned
from pallas_kernels._common.config import Config, SmallConfig, TileConfig, to_json
from pallas_kernels._common.device import KNOWN_DEVICES, Device, current_device
from pallas_kernels._common.testing import relative_error

SMALL_TOKENS = 64

# (block_m, columns of the weight tile, block_k, warps, stages), bands tried with each.
TILES = (
    (128, 256, 64, 8, 3, (4, 8, 16)),
    (128, 256, 64, 8, 4, (8,)),
    (128, 128, 64, 4, 3, (8, 16)),
    (256, 128, 64, 8, 4, (8,)),
    (64, 256, 64, 4, 3, (8,)),
    (128, 64, 64, 4, 3, (16,)),
    (64, 128, 64, 4, 3, (16,)),
    (256, 64, 64, 8, 3, (8,)),
    (128, 32, 64, 4, 4, (16,)),
    (128, 16, 64, 4, 4, (16,)),
)
# Before Hopper: the accumulators of mma.sync leave less room, and there is less shared memory.
TILES_MMA = (
    (128, 128, 32, 8, 4, (8, 16)),
    (128, 128, 64, 8, 3, (8,)),
    (128, 64, 32, 4, 4, (8, 16)),
    (64, 64, 64, 4, 3, (8,)),
    (128, 32, 64, 4, 3, (16,)),
    (128, 16, 64, 4, 3, (16,)),
)
ONE_TOKEN = ((8, 256, 4, 3), (2, 4096, 4, 1), (2, 2048, 4, 1), (4, 2048, 4, 1), (8, 512, 4, 2))
FEW_TOKENS = (
    (64, 128, 4, 3),
    (64, 64, 4, 4),
    (64, 64, 4, 8),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
    (32, 128, 4, 3),
    (16, 256, 4, 3),
    (16, 512, 4, 2),
)


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """What `wide tune` measures, and where it writes the table."""

    out: Path  # a folder; the file is named after the device kind (WIDE_TUNED_DIR reads it)
    model: str = "llama-3.1-8b"
    tokens: tuple[int, ...] = (1, 8, 64, 512, 2048, 16384)
    query_groups: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    ffn_groups: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    sparsities: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    rounds: int = 12
    again: bool = False  # measure also what the table already has


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

    shapes: list[tuple[OpName, int, int]] = [
        ("gemm_mn", m, g) for m, g in itertools.product(config.tokens, config.query_groups)
    ]
    shapes += [("swiglu_up", m, g) for m, g in itertools.product(config.tokens, config.ffn_groups)]
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    refused = 0
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("tuning", total=len(shapes))
        for op, m, group in shapes:
            problem = product(op, m, group, config.model)
            progress.update(task, description=f"{op} m={m} group={group}")
            done = {entry.key for entry in table.entries}
            missing = [s for s in config.sparsities if key(problem, s) not in done]
            if missing:
                entries, failures = tune(problem, missing, device, config.rounds)
                refused += len(failures)
                for name, reason in failures.items():
                    console.print(f"  not run: {op} m={m} group={group} {name}: {reason}")
                table = dataclasses.replace(table, entries=(*table.entries, *entries))
                tuned.write(table, path)
                for entry in entries:
                    console.print(_line(entry))
            progress.advance(task)
    console.print(f"{len(table.entries)} problems in {path}; {refused} candidates could not run")
    return table


def key(problem: Product, sparsity: float) -> tuple:
    """The table key of a problem."""
    p = problem
    return (p.op, p.dtype, p.m, p.n, p.k, p.group, sparsity)


def candidates(problem: Product, device: Device) -> list[Config]:
    """The configs worth trying: no wider than a group, and within the card's shared memory."""
    matrices = MATRICES[problem.op]
    capability = device.capability or "8.0"
    found: list[Config] = []
    if problem.m <= SMALL_TOKENS:
        shapes = ONE_TOKEN if problem.m == 1 else FEW_TOKENS
        found += [SmallConfig(min(bn, problem.group), bk, w, s) for bn, bk, w, s in shapes]
    else:
        tiles = TILES if capability.startswith("9.") else TILES_MMA
        for bm, columns, bk, warps, stages, bands in tiles:
            block_n = columns // matrices
            if 16 <= block_n <= problem.group:
                found += [TileConfig(bm, block_n, bk, warps, stages, band) for band in bands]
    itemsize = jnp.dtype(problem.dtype).itemsize
    limit = device.shared_memory_per_block
    return [
        c
        for c in dict.fromkeys(found)
        if c.shared_memory_bytes(itemsize, matrices, capability, problem.m) <= limit
    ]


def tune(
    problem: Product, sparsities: list[float], device: Device, rounds: int
) -> tuple[list[tuned.Entry], dict[str, str]]:
    """Measure all candidates at the given sparsities: the winners, and what could not run."""
    x, weights = operands(problem)
    kind = "clustered" if 1 < problem.m <= SMALL_TOKENS else "random"
    layouts = {}
    for s in sparsities:
        mask = make_mask(kind, problem, s)
        if problem.m == 1 and s > 0:  # exactly the sparsity asked for
            mask = ((jnp.arange(problem.groups) * s) % 1.0 < 1.0 - s)[None, :]
        layouts[s] = pallas_kernels.mask_layout(mask)
    functions = {"dense": (pruned_op(problem, "dense"), (x, weights[0], layouts[sparsities[0]]))}
    functions["plain"] = (dense(problem), (x, weights[0], layouts[sparsities[0]]))
    configs = {str(c): c for c in candidates(problem, device)}
    for name, config in configs.items():
        run = pruned_op(problem, "triton", config)
        functions[name] = (run, (x, weights[0], layouts[sparsities[0]]))
    compiled, failures = compile_all(functions, workers=14)
    for required in ("dense", "plain"):
        if required in failures:
            raise failures[required]
    entries = []
    for s in sparsities:
        _check(problem, compiled, configs, x, weights[0], layouts[s])
        sets = [(x, w, layouts[s]) for w in weights]
        timings = time_interleaved({n: (c, sets) for n, c in compiled.items()}, rounds)
        baseline = min(timings["dense"].ms, timings["plain"].ms)
        best = min((n for n in timings if n != "plain"), key=lambda n: timings[n].ms)
        fastest = min(configs.keys() & timings.keys(), key=lambda n: timings[n].ms, default=None)
        entries.append(
            tuned.Entry(
                problem.op,
                problem.dtype,
                problem.m,
                problem.n,
                problem.k,
                problem.group,
                s,
                "dense" if best == "dense" else "triton",
                None if fastest is None else configs[fastest],
                round(timings[best].ms, 5),
                round(baseline, 5),
            )
        )
    return entries, {name: repr(error)[:160] for name, error in failures.items()}


def _check(
    problem: Product, compiled: dict[str, Compiled], configs: dict[str, Config], x, weights, layout
) -> None:
    """Raise `RuntimeError` if a candidate disagrees with the dense product: never tune on junk."""
    expected = compiled["dense"].call(x, weights, layout)
    for name in configs.keys() & compiled.keys():
        error = relative_error(compiled[name].call(x, weights, layout), expected)
        if not error < 1e-2:
            raise RuntimeError(f"{problem}: {name} differs from dense by {error:.2g}")


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
    "is above 0.98. Tiles: the widest that fits the card's shared memory."
)


def derive(device: Device, config: TuneConfig) -> tuned.Table:
    """The table of a card that nobody measured, from `DERIVATION`'s model."""
    rate = {128: 0.85, 64: 0.65, 32: 0.45, 16: 0.25}
    entries = []
    shapes: list[tuple[OpName, int, int]] = [
        ("gemm_mn", m, g) for m in config.tokens for g in config.query_groups
    ]
    shapes += [("swiglu_up", m, g) for m in config.tokens for g in config.ffn_groups]
    for (op, m, group), s in itertools.product(shapes, config.sparsities):
        problem = product(op, m, group, config.model)
        chosen = candidates(problem, device)[0]
        if isinstance(chosen, SmallConfig):
            relative = (1.0 - s**m) / 0.9
        else:
            columns = min(128, chosen.block_n * MATRICES[op])
            active = m * (1.0 - s)
            relative = (1.0 - s) * (1.0 + chosen.block_m / (2 * active)) / rate[columns]
        entries.append(
            tuned.Entry(
                op,
                problem.dtype,
                m,
                problem.n,
                problem.k,
                group,
                s,
                "triton" if relative < 0.98 else "dense",
                chosen,
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
