"""Which implementation and which tile sizes run: a table lookup that can be asked about.

`choose` is a pure function of static facts (op, shapes, dtype, hint, device). It reads the
checked-in table of the device's class (`tuned/*.json`, written by the tuner) and answers with
implementation, config, the reason in words and whether the numbers behind it were measured on this
device kind. Nothing here looks at a mask's values, so nothing waits for the device.
"""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Literal

import jax

from pallas_kernels._common import triton_support, tuned
from pallas_kernels._common.config import Config, SmallConfig, TileConfig
from pallas_kernels._common.config import Implementation as Implementation
from pallas_kernels._common.device import Device, current_device

Op = Literal["gemm_mn", "swiglu_up"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "dense", "pallas", "triton")

# What a hint of None stands for: the sparsity the method is usually trained to.
UNKNOWN_SPARSITY = 0.5
SMALL_TOKENS = 64
MATRICES = {"gemm_mn": 1, "swiglu_up": 2}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static facts of one call: `x[m, k]` times `w[n, k]`, groups of `group` channels of n."""

    op: Op
    m: int
    n: int
    k: int
    group: int
    dtype: str
    expected_sparsity: float | None = None

    @classmethod
    def of(
        cls, op: Op, x: jax.Array, w: jax.Array, group: int, expected_sparsity: float | None
    ) -> "Problem":
        """The problem of a call's operands: `x[m, k]`, and one weight `w[n, k]`."""
        (m, k), n = x.shape, w.shape[0]
        return cls(op, m, n, k, group, x.dtype.name, expected_sparsity)

    @property
    def small(self) -> bool:
        """Whether the form for few tokens applies."""
        return self.m <= SMALL_TOKENS

    @property
    def sparsity(self) -> float:
        """The hint, or what stands for none."""
        return UNKNOWN_SPARSITY if self.expected_sparsity is None else self.expected_sparsity


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


def explain(
    op: Op,
    *,
    m: int,
    n: int,
    k: int,
    group: int,
    dtype: str = "bfloat16",
    expected_sparsity: float | None = None,
    device: Device | None = None,
) -> Choice:
    """What `implementation=None` runs for `x[m, k]`, `w[n, k]` in groups of `group` channels."""
    return choose(Problem(op, m, n, k, group, dtype, expected_sparsity), device)


def choose(problem: Problem, device: Device | None = None) -> Choice:
    """What `implementation=None` runs. `device` defaults to the current one."""
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
        return _fitted(entry.config, problem)
    return default_config(problem, device.shared_memory_per_block, device.capability)


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
        config = _fitted(config, problem)
    measured = exact and table.measured and entry.dtype == problem.dtype
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
    candidates = [
        entry
        for entry in table.entries
        if entry.op == problem.op
        and _same_width(entry.dtype, problem.dtype)
        and (entry.m <= SMALL_TOKENS) == problem.small
        and accept(entry)
        and _fits(entry.config, problem, device)
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


def _fits(config: Config | None, problem: Problem, device: Device) -> bool:
    if config is None:
        return True
    if isinstance(config, SmallConfig) and not problem.small:
        return False
    itemsize = 4 if problem.dtype == "float32" else 2
    capability = device.capability or "8.0"
    needed = config.shared_memory_bytes(itemsize, MATRICES[problem.op], capability, problem.m)
    return needed <= device.shared_memory_per_block


def _fitted(config: Config, problem: Problem) -> Config:
    """The config with a channel tile no wider than a group."""
    widest = max(16, 1 << (problem.group - 1).bit_length())
    if config.block_n <= widest:
        return config
    return dataclasses.replace(config, block_n=widest)


def default_config(problem: Problem, shared_memory: int, capability: str) -> Config:
    """Tile sizes from shapes alone, for a card or dtype without a table.

    The largest tile of a short list whose shared memory fits; float32 runs on 64 x 64 tiles.
    """
    itemsize = 4 if problem.dtype == "float32" else 2
    matrices = MATRICES[problem.op]
    widest = max(16, 1 << (problem.group - 1).bit_length())
    if problem.small:
        if problem.m == 1:
            candidates: list[Config] = [SmallConfig(8, 512, 4, 1)]
        else:
            candidates = [SmallConfig(64, 64, 4, 3), SmallConfig(32, 64, 4, 2)]
    elif problem.dtype == "float32":
        candidates = [TileConfig(64, min(64 // matrices, widest), 32, 4, 2, 8)]
    else:
        # mma.sync keeps operands in registers beside the accumulators: 256 columns spill.
        columns = 256 if capability.startswith("9.") else 128
        wide = min(columns // matrices, widest)
        candidates = [
            TileConfig(128, wide, 64, 8, 3, 16),
            TileConfig(128, min(wide, 128 // matrices), 64, 8, 3, 16),
            TileConfig(128, min(wide, 128 // matrices), 32, 8, 3, 16),
            TileConfig(64, min(wide, 64 // matrices), 32, 4, 2, 16),
        ]
    for config in candidates:
        needed = config.shared_memory_bytes(itemsize, matrices, capability, problem.m)
        if needed <= shared_memory:
            return config
    return candidates[-1]
