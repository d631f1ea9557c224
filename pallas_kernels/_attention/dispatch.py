"""Which implementation and tile sizes attention runs with: static facts in, a reason out.

`choose` reads the table of the device's class (`tuned/*.json`, written by `wide tune`), as the
products' dispatch does. Nothing here looks at a mask's values.
"""

import dataclasses
import logging
import math
from typing import Literal

from pallas_kernels._attention import tables
from pallas_kernels._attention.config import (
    AttentionConfig,
    AttentionImplementation,
    DecodeConfig,
    FlashConfig,
    MosaicConfig,
)
from pallas_kernels._common import triton_support
from pallas_kernels._common.device import Device, current_device
from pallas_kernels._common.problem import UNKNOWN_SPARSITY

AttentionOp = Literal["attention_prefill", "attention_decode"]
IMPLEMENTATIONS: dict[AttentionOp, tuple[AttentionImplementation, ...]] = {
    "attention_prefill": ("reference", "dense", "triton", "mosaic"),
    "attention_decode": ("reference", "dense", "triton"),
}
MOSAIC_HEAD_SIZES = (64, 128, 256)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """The static facts of one call: `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads a group.

    `plain`: what cuDNN can run without a T x S mask. For prefill, whole rows from slot 0 (lengths
    and a window may differ); for decode, rows from slot 0 without a window. Decode has t = 1.
    `from_start`: queries see from slot 0 on: no window, segments or left padding.
    """

    op: AttentionOp
    b: int
    t: int
    s: int
    hq: int
    hk: int
    d: int
    group: int
    dtype: str
    expected_sparsity: float | None = None
    plain: bool = True
    from_start: bool = True

    @property
    def sparsity(self) -> float:
        """The hint, or what stands for none."""
        return UNKNOWN_SPARSITY if self.expected_sparsity is None else self.expected_sparsity

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """What runs, and why; `config` is None where the implementation has no tile sizes.

    `measured`: the choice rests on measurements of this very device kind.
    """

    implementation: AttentionImplementation
    config: AttentionConfig | None
    reason: str
    measured: bool


def explain_attention(
    op: AttentionOp,
    *,
    b: int,
    t: int,
    s: int,
    hq: int,
    hk: int,
    d: int,
    group: int,
    dtype: str = "bfloat16",
    expected_sparsity: float | None = None,
    plain: bool = True,
    from_start: bool = True,
    device: Device | None = None,
) -> AttentionChoice:
    """What `implementation=None` runs for `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads.

    `plain` and `from_start` as in `AttentionProblem`.
    """
    facts = AttentionProblem(
        op, b, t, s, hq, hk, d, group, dtype, expected_sparsity, plain, from_start
    )
    return choose(facts, device)


def choose(problem: AttentionProblem, device: Device | None = None) -> AttentionChoice:
    """What `implementation=None` runs. `device` defaults to the current one."""
    device = device or current_device()
    if device.capability is None:
        reason = f"{device.kind} is not a CUDA device"
        return AttentionChoice("reference", None, reason, measured=False)
    dense_can = problem.plain and problem.dtype != "float32"
    if not kernels_for(problem, device):
        reason = f"kernels need compute capability 8.0 or later, not {device.capability}"
        if float(device.capability) >= 8.0:
            reason = "jax-triton and triton are not installed (the `gpu` extra)"
        fallback: AttentionImplementation = "reference"
        if dense_can and float(device.capability) >= 8.0:
            fallback = "dense"
        log.warning("%s runs %s: %s", problem.op, fallback, reason)
        return AttentionChoice(fallback, None, reason, measured=False)
    found = tables.table_for(device)
    entry = None if found is None else _nearest(problem, device, found[0])
    if found is None or entry is None:
        config = default_config(problem, "triton", device)
        reason = f"no entry for {problem.op}, heads of {problem.d}, on {device.kind}: derived"
        return AttentionChoice("triton", config, reason, measured=False)
    table, exact = found
    reason = (
        f"{table.device_kind}: nearest entry b={entry.b} t={entry.t} s={entry.s} "
        f"heads={entry.hq}/{entry.hk}x{entry.d} group={entry.group} sparsity={entry.sparsity:g}"
    )
    if entry.ms is not None and entry.dense_ms is not None:
        reason += f" took {entry.ms:.4f} ms, dense {entry.dense_ms:.4f} ms"
    measured = exact and table.measured and entry.dtype == problem.dtype
    if entry.implementation == "dense" and dense_can:
        return AttentionChoice("dense", None, reason, measured)
    if entry.implementation == "dense":
        reason += "; dense cannot run this: the fastest kernel"
    return AttentionChoice(implementation_of(entry.config), entry.config, reason, measured)


def kernels_for(
    problem: AttentionProblem, device: Device | None = None
) -> tuple[AttentionImplementation, ...]:
    """The kernels to choose from on the device.

    Of Mosaic's forms, those that have run on a card: whole rows from slot 0. The others run by
    name and in the interpreter; docs/kernels_attention.md says what ran where.
    """
    device = device or current_device()
    if device.capability is None or float(device.capability) < 8.0:
        return ()
    if not triton_support.available():
        return ()
    whole_rows = problem.op == "attention_prefill" and problem.plain and problem.from_start
    heads = problem.itemsize == 2 and problem.d in MOSAIC_HEAD_SIZES
    if device.capability == "9.0" and whole_rows and heads:
        return ("mosaic", "triton")
    return ("triton",)


def config_for(
    problem: AttentionProblem,
    implementation: AttentionImplementation,
    device: Device | None = None,
) -> AttentionConfig:
    """Tile sizes for a kernel that was asked for by name: the nearest tuned ones that fit."""
    device = device or current_device()
    if device.capability is not None and (found := tables.table_for(device)) is not None:
        entry = _nearest(problem, device, found[0], implementation)
        if entry is not None:
            return entry.config
    return default_config(problem, implementation, device)


def default_config(
    problem: AttentionProblem, implementation: AttentionImplementation, device: Device
) -> AttentionConfig:
    """Tile sizes from shapes alone: the first of a short list whose shared memory fits.

    mma.sync (before and after Hopper) keeps operands in registers beside the accumulators: larger
    tiles spill there. float32 products run on the ordinary units, in small tiles.
    """
    capability = device.capability or "8.0"
    wide, wgmma = problem.d > 128, capability.startswith("9.")
    if problem.op == "attention_decode":
        block_n, stages = (32, 2) if problem.itemsize == 4 else (64, 3)
        candidates: list[AttentionConfig] = [
            DecodeConfig(512, block_n, 4, stages),
            DecodeConfig(512, 16, 4, 2),
        ]
    elif implementation == "mosaic":
        candidates = [MosaicConfig(192, 2), MosaicConfig(128, 2), MosaicConfig(64, 2)]
    elif problem.itemsize == 4:
        candidates = [FlashConfig(16, 16, 8, 1)] if wide else [FlashConfig(32, 16, 8, 1)]
    elif wide:
        candidates = [FlashConfig(64, 64, 8, 2)] if wgmma else [FlashConfig(64, 32, 8, 2)]
    elif wgmma:
        candidates = [FlashConfig(128, 64, 8, 3)]
    elif problem.d > 64:
        candidates = [FlashConfig(128, 32, 8, 3), FlashConfig(64, 32, 4, 2)]
    else:
        candidates = [FlashConfig(128, 64, 8, 2), FlashConfig(64, 32, 4, 2)]
    limit = device.shared_memory_per_block or 101_376
    for config in candidates:
        if config.shared_memory_bytes(problem.d, problem.itemsize, capability) <= limit:
            return config
    return candidates[-1]


def implementation_of(config: AttentionConfig) -> AttentionImplementation:
    """The kernel that a config is for."""
    return "mosaic" if isinstance(config, MosaicConfig) else "triton"


def _nearest(
    problem: AttentionProblem,
    device: Device,
    table: tables.AttentionTable,
    implementation: AttentionImplementation | None = None,
) -> tables.AttentionEntry | None:
    """The entry of the same op, head size and dtype width whose shape is nearest in powers of two.

    Tokens count twice. An entry tuned for *more* skipping than the hint is as far as one doubling
    per 3 %, for less skipping per 6 %.
    """
    limit, capability = device.shared_memory_per_block, device.capability or "8.0"
    runs = kernels_for(problem, device) if implementation is None else (implementation,)
    candidates = [
        entry
        for entry in table.entries
        if (entry.op, entry.d) == (problem.op, problem.d)
        and (entry.dtype == "float32") == (problem.dtype == "float32")
        and implementation_of(entry.config) in runs
        and entry.config.shared_memory_bytes(entry.d, problem.itemsize, capability) <= limit
    ]

    def distance(entry: tables.AttentionEntry) -> float:
        excess = entry.sparsity - problem.sparsity
        return (
            2 * abs(math.log2(entry.t / problem.t))
            + sum(
                abs(math.log2(getattr(entry, name) / getattr(problem, name)))
                for name in ("b", "s", "hq", "hk", "group")
            )
            + (32 * excess if excess > 0 else -16 * excess)
        )

    return min(candidates, key=distance, default=None)


def resolve(
    problem: AttentionProblem,
    implementation: AttentionImplementation | None,
    config: AttentionConfig | None,
) -> tuple[AttentionImplementation, AttentionConfig | None]:
    """The implementation to run and its config; `None` asks the table.

    Raises `ValueError` on an unknown name, or a config for what has none.
    """
    if implementation is None:
        if config is not None:
            raise ValueError("name the implementation that the config is for")
        choice = choose(problem)
        return choice.implementation, choice.config
    known = IMPLEMENTATIONS[problem.op]
    if implementation not in known:
        raise ValueError(f"unknown {implementation=}; known: {', '.join(known)}")
    if implementation in ("reference", "dense"):
        if config is not None:
            raise ValueError(f"implementation='{implementation}' has no tile sizes to configure")
        return implementation, None
    return implementation, config or config_for(problem, implementation)
