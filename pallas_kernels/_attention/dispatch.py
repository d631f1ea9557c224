"""Which implementation and tile sizes attention runs with: static facts in, a reason out."""

import dataclasses
import logging
from typing import Literal

from pallas_kernels._attention.config import (
    AttentionConfig,
    AttentionImplementation,
    DecodeConfig,
    FlashConfig,
    MosaicConfig,
)
from pallas_kernels._common import triton_support
from pallas_kernels._common.device import Device, current_device

AttentionOp = Literal["attention_prefill", "attention_decode"]
IMPLEMENTATIONS: dict[AttentionOp, tuple[AttentionImplementation, ...]] = {
    "attention_prefill": ("reference", "dense", "triton", "mosaic"),
    "attention_decode": ("reference", "dense", "triton"),
}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """The static facts of one call: `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads a group.

    `plain`: rows are whole sequences from slot 0 (only their lengths and a window may differ),
    which is what cuDNN's causal attention takes. Decode has t = 1.
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
    device: Device | None = None,
) -> AttentionChoice:
    """What `implementation=None` runs for `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads."""
    facts = AttentionProblem(op, b, t, s, hq, hk, d, group, dtype, expected_sparsity, plain)
    return choose(facts, device)


def choose(problem: AttentionProblem, device: Device | None = None) -> AttentionChoice:
    """What `implementation=None` runs. `device` defaults to the current one."""
    device = device or current_device()
    if device.capability is None:
        return AttentionChoice(
            "reference", None, f"{device.kind} is not a CUDA device", measured=False
        )
    if float(device.capability) < 8.0 or not triton_support.available():
        reason = (
            f"kernels need compute capability 8.0 or later, not {device.capability}"
            if float(device.capability) < 8.0
            else "jax-triton and triton are not installed (the `gpu` extra)"
        )
        log.warning("%s runs its reference: %s", problem.op, reason)
        return AttentionChoice("reference", None, reason, measured=False)
    config = config_for(problem, "triton", device)
    return AttentionChoice("triton", config, "derived from shapes", measured=False)


def config_for(
    problem: AttentionProblem,
    implementation: AttentionImplementation,
    device: Device | None = None,
) -> AttentionConfig:
    """Tile sizes for a kernel that was asked for by name."""
    device = device or current_device()
    capability = device.capability or "8.0"
    limit = device.shared_memory_per_block or 101_376
    itemsize = 4 if problem.dtype == "float32" else 2
    if problem.op == "attention_decode":
        candidates: list[AttentionConfig] = [
            DecodeConfig(1024, 64, 4, 3),
            DecodeConfig(1024, 16, 4, 2),
        ]
    elif implementation == "mosaic":
        candidates = [MosaicConfig(128, 2), MosaicConfig(64, 2)]
    else:
        candidates = [
            FlashConfig(128, 64, 8, 2),
            FlashConfig(64, 32, 4, 2),
            FlashConfig(32, 32, 4, 1),
        ]
    for config in candidates:
        if config.shared_memory_bytes(problem.d, itemsize, capability) <= limit:
            return config
    return candidates[-1]


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
