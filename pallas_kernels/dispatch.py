"""Which implementation and which tile sizes run: a table lookup that can be asked about.

`choose` is a pure function of static facts (op, shapes, dtype, hint, device); what is special
about an op is in its `facts.py`. It reads the checked-in table of the device's class
(`tuned/*.json`, written by the tuner) and answers with implementation, config, the reason in words
and whether the numbers behind it were measured on this device kind. Nothing here looks at a mask's
values, so nothing waits for the device.
"""

import dataclasses
import logging
import math
from typing import Any

from pallas_kernels._common import triton_support, tuned
from pallas_kernels._common.config import Implementation as Implementation
from pallas_kernels._common.device import Device, current_device
from pallas_kernels._common.problem import SMALL_TOKENS as SMALL_TOKENS
from pallas_kernels._common.problem import AnyImplementation, Call
from pallas_kernels._common.problem import Problem as Problem
from pallas_kernels._common.problem import facts as facts

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs, and why.

    `measured`: the choice rests on measurements of this very device kind. `config` is None where
    the implementation has no tile sizes (reference, dense).
    """

    implementation: AnyImplementation
    config: Any
    reason: str
    measured: bool


def explain(
    op: str,
    *,
    dtype: str = "bfloat16",
    expected_sparsity: float | None = None,
    device: Device | None = None,
    **shape: int,
) -> Choice:
    """What `implementation=None` runs.

    `shape` is `m, n, k, group` for products (`Problem`), and `b, t, s, hq, hk, d, group` for
    attention, with `plain` and `from_start` where they are not true (`AttentionProblem`).
    `attention_step` has no table of its own: it runs what is said of `attention_decode`.

    Raises `ValueError` on an unknown op, `TypeError` on a shape that is not the op's.
    """
    problem = facts(op).problem(op=op, dtype=dtype, expected_sparsity=expected_sparsity, **shape)
    return choose(problem, device)


def choose(problem: Call, device: Device | None = None) -> Choice:
    """What `implementation=None` runs. `device` defaults to the current one."""
    device = device or current_device()
    if device.capability is None:
        return Choice("reference", None, f"{device.kind} is not a CUDA device", measured=False)
    if float(device.capability) < 8.0:
        reason = f"kernels need compute capability 8.0 or later, not {device.capability}"
        return _without_kernels(problem, device.capability, reason)
    choice = _from_table(problem, device, device.capability)
    if choice.config is not None and not triton_support.available():
        reason = f"jax-triton and triton are not installed (the `gpu` extra); {choice.reason}"
        return _without_kernels(problem, device.capability, reason)
    return choice


def resolve(
    problem: Call, implementation: AnyImplementation | None, config: Any
) -> tuple[Any, Any]:
    """The implementation to run and its config; `None` asks the table.

    Raises `ValueError` on an unknown name, or a config for what has none.
    """
    if implementation is None:
        if config is not None:
            raise ValueError("name the implementation that the config is for")
        choice = choose(problem)
        return choice.implementation, choice.config
    op = facts(problem.op)
    if implementation not in op.implementations:
        known = ", ".join(op.implementations)
        raise ValueError(f"unknown {implementation=}; known: {known}")
    if implementation in ("reference", "dense"):
        if config is not None:
            raise ValueError(f"implementation='{implementation}' has no tile sizes to configure")
        return implementation, None
    return implementation, config or config_for(problem, kernel=implementation)


def config_for(
    problem: Call, device: Device | None = None, kernel: AnyImplementation = "triton"
) -> Any:
    """Tile sizes for a kernel that was asked for by name: the nearest tuned ones that fit."""
    op, device = facts(problem.op), device or current_device()
    if kernel == "pallas":
        config = config_for(problem, device)
        return config if op.for_pallas is None else op.for_pallas(config, problem)
    found = None if device.capability is None else tuned.table_for(device)
    entry = None if found is None else _nearest(problem, device, found[0], (kernel,))
    if entry is not None:
        return op.fitted(entry.config, problem)
    # For interpreters, without a capability, any will do.
    limit, capability = device.shared_memory_per_block or 101_376, device.capability or "8.0"
    default = op.mosaic_config if kernel == "mosaic" else op.default_config
    if default is None:
        raise ValueError(f"{problem.op} has no kernel in {kernel}")
    return default(problem, limit, capability)


def default_config(problem: Call, shared_memory: int, capability: str) -> Any:
    """Tile sizes from shapes alone, for a card or dtype without a table: the op's own rule."""
    return facts(problem.op).default_config(problem, shared_memory, capability)


def _without_kernels(problem: Call, capability: str, reason: str) -> Choice:
    dense = facts(problem.op).dense_runs(problem, capability)
    choice = Choice("dense" if dense else "reference", None, reason, measured=False)
    log.warning("%s runs %s through XLA: %s", problem.op, choice.implementation, reason)
    return choice


def _from_table(problem: Call, device: Device, capability: str) -> Choice:
    op, found = facts(problem.op), tuned.table_for(device)
    names = op.kernels(problem, capability)
    dense_runs = op.dense_runs(problem, capability)
    entry = None
    if found is not None:
        entry = _nearest(problem, device, found[0], (*names, "dense") if dense_runs else names)
    if found is None or entry is None:
        config = default_config(problem, device.shared_memory_per_block, capability)
        reason = f"no table for {device.kind}: derived"
        if found is not None:
            kind = found[0].device_kind
            reason = f"no entry for {problem.op} in {problem.dtype} for {kind}: derived"
        return Choice("triton", config, reason, measured=False)
    table, exact = found
    shape = " ".join(f"{name}={size}" for name, size in entry.problem.shape.items())
    reason = f"{table.device_kind}: nearest entry {shape} sparsity={entry.sparsity:g}"
    if entry.ms is not None and entry.dense_ms is not None:
        reason += f" took {entry.ms:.4f} ms, dense {entry.dense_ms:.4f} ms"
    timed = table.measured and entry.ms is not None
    measured = exact and timed and entry.problem.dtype == problem.dtype
    if entry.implementation == "dense":
        if dense_runs:
            return Choice("dense", None, reason, measured)
        reason += "; dense cannot run this: the fastest kernel"
    return Choice(op.kernel_of(entry.config), op.fitted(entry.config, problem), reason, measured)


def _nearest(
    problem: Call, device: Device, table: tuned.Table, names: tuple[AnyImplementation, ...]
) -> tuned.Entry | None:
    """The comparable entry of the same op whose shape is nearest in weighted powers of two.

    `names` are the kernels that its config may be for; "dense": it may have none. An entry tuned
    for *more* skipping than the hint is as far as one doubling (of weight 1) per 3 %, for less
    skipping per 6 %.
    """
    op = facts(problem.op)
    limit, capability = device.shared_memory_per_block, device.capability or "8.0"
    candidates = [
        entry
        for entry in table.entries
        if entry.op == problem.op
        and problem.comparable(entry.problem)
        and ("dense" if entry.config is None else op.kernel_of(entry.config)) in names
        and op.fits(entry.config, problem, limit, capability)
    ]

    def distance(entry: tuned.Entry) -> float:
        excess = entry.sparsity - problem.sparsity
        return sum(
            weight * abs(math.log2(getattr(entry.problem, name) / getattr(problem, name)))
            for name, weight in problem.SHAPE.items()
        ) + (32 * excess if excess > 0 else -16 * excess)

    return min(candidates, key=distance, default=None)
