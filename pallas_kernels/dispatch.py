"""Which implementation and which tile sizes run: a table lookup that can be asked about.

`choose` is a pure function of static facts (op, shapes, dtype, hint, device). It reads the
checked-in table of the device's class (`tuned/*.json`, written by the tuner) and answers with
implementation, config, the reason in words and whether the numbers behind it were measured on this
device kind. Nothing here looks at a mask's values, so nothing waits for the device.
"""

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable

from pallas_kernels._common import triton_support, tuned
from pallas_kernels._common.config import Config
from pallas_kernels._common.config import Implementation as Implementation
from pallas_kernels._common.device import Device, current_device
from pallas_kernels._common.problem import SMALL_TOKENS as SMALL_TOKENS
from pallas_kernels._common.problem import OpFacts
from pallas_kernels._common.problem import Problem as Problem

# Op -> the module with its `FACTS`. An op is known to dispatch, `wide tune` and `explain` by this.
OPS = {
    "gemm_k": "pallas_kernels.gemm_k.facts",
    "gemm_mn": "pallas_kernels.gemm_mn.facts",
    "swiglu_up": "pallas_kernels.swiglu_up.facts",
}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs, and why.

    `measured`: the choice rests on measurements of this very device kind. `config` is None where
    the implementation has no tile sizes (reference, dense).
    """

    implementation: Implementation
    config: Config | None
    reason: str
    measured: bool


def facts(op: str) -> OpFacts:
    """What is known of an op. Raises `ValueError` on an unknown name."""
    if op not in OPS:
        raise ValueError(f"unknown {op=}; known: {', '.join(OPS)}")
    return importlib.import_module(OPS[op]).FACTS


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    group: int,
    dtype: str = "bfloat16",
    expected_sparsity: float | None = None,
    device: Device | None = None,
) -> Choice:
    """What `implementation=None` runs for `x[m, k]`, `w[n, k]` in groups of `group` channels.

    Raises `ValueError` on an unknown op.
    """
    return choose(Problem(op, m, n, k, group, dtype, expected_sparsity), device)


def choose(problem: Problem, device: Device | None = None) -> Choice:
    """What `implementation=None` runs. `device` defaults to the current one."""
    facts(problem.op)
    device = device or current_device()
    if device.capability is None:
        return Choice("reference", None, f"{device.kind} is not a CUDA device", measured=False)
    if float(device.capability) < 8.0:
        reason = f"kernels need compute capability 8.0 or later, not {device.capability}"
        return Choice("dense", None, reason, measured=False)
    choice = _from_table(problem, device, device.capability)
    if choice.implementation == "triton" and not triton_support.available():
        reason = f"jax-triton and triton are not installed (the `gpu` extra); {choice.reason}"
        log.warning("%s runs dense through XLA: %s", problem.op, reason)
        return Choice("dense", None, reason, measured=False)
    return choice


def config_for(problem: Problem, device: Device | None = None) -> Config:
    """Tile sizes for a kernel that was asked for by name: the nearest tuned ones that fit."""
    device = device or current_device()
    if device.capability is None:
        return default_config(problem, 101_376, "8.0")  # interpreters: any will do
    found = tuned.table_for(device)
    entry = (
        None
        if found is None
        else _nearest(problem, device, found[0], lambda e: e.config is not None)
    )
    if entry is not None and entry.config is not None:
        return facts(problem.op).fitted(entry.config, problem)
    return default_config(problem, device.shared_memory_per_block, device.capability)


def default_config(problem: Problem, shared_memory: int, capability: str) -> Config:
    """Tile sizes from shapes alone, for a card or dtype without a table: the op's own rule."""
    return facts(problem.op).default_config(problem, shared_memory, capability)


def _from_table(problem: Problem, device: Device, capability: str) -> Choice:
    found = tuned.table_for(device)
    if found is None:
        config = default_config(problem, device.shared_memory_per_block, capability)
        return Choice("triton", config, f"no table for {device.kind}: derived", measured=False)
    table, exact = found
    entry = _nearest(problem, device, table, lambda e: True)
    if entry is None:
        config = default_config(problem, device.shared_memory_per_block, capability)
        reason = f"no entry for {problem.op} in {problem.dtype} for {table.device_kind}: derived"
        return Choice("triton", config, reason, measured=False)
    reason = (
        f"{table.device_kind}: nearest entry m={entry.m} n={entry.n} k={entry.k} "
        f"group={entry.group} sparsity={entry.sparsity:g}"
    )
    if entry.ms is not None and entry.dense_ms is not None:
        reason += f" took {entry.ms:.4f} ms, dense {entry.dense_ms:.4f} ms"
    config = None if entry.implementation == "dense" else entry.config
    if config is not None:
        config = facts(problem.op).fitted(config, problem)
    timed = table.measured and entry.ms is not None
    measured = exact and timed and entry.dtype == problem.dtype
    return Choice(entry.implementation, config, reason, measured)


def _nearest(
    problem: Problem,
    device: Device,
    table: tuned.Table,
    accept: Callable[[tuned.Entry], bool],
) -> tuned.Entry | None:
    """The entry of the same op, dtype width and form whose shape is nearest in powers of two.

    Group size counts four times, token count twice. An entry tuned for *more* skipping than the
    hint is as far as one group-size doubling per 12.5 %; for less skipping, per 25 %.
    """
    op = facts(problem.op)
    limit, capability = device.shared_memory_per_block, device.capability or "8.0"
    candidates = [
        entry
        for entry in table.entries
        if entry.op == problem.op
        and _same_width(entry.dtype, problem.dtype)
        and (entry.m <= SMALL_TOKENS) == problem.small
        and accept(entry)
        and op.fits(entry.config, problem, limit, capability)
    ]

    def distance(entry: tuned.Entry) -> float:
        excess = entry.sparsity - problem.sparsity
        return (
            4 * abs(math.log2(entry.group / problem.group))
            + 2 * abs(math.log2(entry.m / problem.m))
            + abs(math.log2(entry.n / problem.n))
            + abs(math.log2(entry.k / problem.k))
            + (32 * excess if excess > 0 else -16 * excess)
        )

    return min(candidates, key=distance, default=None)


def _same_width(a: str, b: str) -> bool:
    """float16 runs exactly as bfloat16 does, and borrows its entries."""
    return (a == "float32") == (b == "float32")
