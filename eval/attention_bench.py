"""Attention's part of `wide bench kernels`: prefill beside cuDNN, decode beside the best dense.

Decode's baseline is the fastest of cuDNN, XLA and our own kernel with every group on, in the same
run: a speedup is claimed over the best dense there is.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from eval.attention_problems import CASES, AttentionCase, decode_case, prefill_case
from eval.kernel_cases.base import MaskKind
from eval.kernel_timing import compile_all, time_interleaved
from pallas_kernels._attention.config import AttentionConfig, AttentionImplementation, to_json
from pallas_kernels._attention.dispatch import AttentionOp, choose, config_for, kernels_for
from pallas_kernels._common.testing import relative_error


@dataclasses.dataclass(frozen=True)
class AttentionBench:
    """Attention's problems: groups are counted in heads."""

    prefill_tokens: tuple[int, ...] = (512, 2048, 16384, 131072)
    groups: tuple[int, ...] = (1, 2, 4, 8)
    one_group_from: int = 32768  # prompts from here on are measured in the last but one only
    decode: tuple[tuple[int, int], ...] = ((1, 16384), (1, 131072), (16, 4096), (16, 16384))
    """Rows, and slots a row."""
    decode_groups: tuple[int, ...] = (4,)
    error_pairs: int = 1 << 24  # errors against float32, up to so many (query, slot) pairs


@dataclasses.dataclass(frozen=True)
class Measure:
    """How every problem is measured."""

    sparsities: tuple[float, ...]
    masks: tuple[MaskKind, ...]
    rounds: int


def cases(ops: tuple[AttentionOp, ...], config: AttentionBench, model: str) -> list[AttentionCase]:
    """Every problem of the ops, prefill first."""
    found = []
    if "attention_prefill" in ops:
        for tokens in config.prefill_tokens:
            long = tokens >= config.one_group_from
            groups = config.groups[-2:][:1] if long else config.groups
            found += [prefill_case(tokens, group, model) for group in groups]
    if "attention_decode" in ops:
        for (b, s), group in itertools.product(config.decode, config.decode_groups):
            found.append(decode_case(b, s, group, model))
    return found


def attention_records(
    case: AttentionCase, config: AttentionBench, measure: Measure
) -> Iterator[dict[str, Any]]:
    """Every sparsity and mask of one problem: every kernel that runs here, and the baselines."""
    sets = case.operands()
    cells = [
        (s, kind)
        for s in measure.sparsities
        for kind in (measure.masks[:1] if s == 0.0 or case.b * case.t == 1 else measure.masks)
    ]
    masks = [case.mask(kind, s) for s, kind in cells]
    choices = [case.choice(mask) for mask in masks]
    everything = case.choice(jnp.ones((case.b * case.t, case.groups), bool))
    contenders = _contenders(case, cells)
    functions = {name: (run, (*sets[0], everything)) for name, run in case.dense().items()}
    for name, (implementation, settings) in contenders.items():
        functions[name] = (case.run(implementation, settings), (*sets[0], everything))
    compiled, failed = compile_all(functions, workers=16)
    for name, error in failed.items():
        raise RuntimeError(f"{case}: {name} does not run") from error
    for i, (s, kind) in enumerate(cells):
        calls = [(*operands, choices[i]) for operands in sets]
        turns = {name: (run, calls) for name, run in compiled.items()}
        baselines = {name: name for name in case.dense()}
        if case.decode:
            full = [(*operands, everything) for operands in sets]
            turns["triton, all on"] = (compiled[_kernel(case, 0.0)], full)
            baselines["triton, all on"] = "triton, all on"
        timings = time_interleaved(turns, measure.rounds)
        best = min(baselines, key=lambda name: timings[name].ms)
        expected = _expected(case, calls[0], config)
        hinted = dataclasses.replace(case.facts, expected_sparsity=s)
        choice = choose(hinted)
        picked = "dense" if choice.config is None else f"{choice.implementation} {choice.config}"
        for name, timing in timings.items():
            implementation, settings = contenders.get(name, (f"{name}, unmasked", None))
            kept = float(masks[i].mean())
            row: dict[str, Any] = {
                "op": case.op,
                "case": CASES[case.op],
                "shape": case.shape,
                "expected_sparsity": s,
                "dtype": case.dtype,
                "sparsity": 1.0 - kept,
                "mask": kind if s > 0.0 else "all_on",
                "implementation": implementation,
                "dispatched": name == picked,
                "config": None if settings is None else to_json(settings),
                "ms": timing.ms,
                "samples_ms": timing.samples_ms,
                "dense_ms": timings[best].ms,
                "dense": f"{best}, unmasked, in turns with the op",
                "ideal_ms": None if case.decode else timings[best].ms * kept,
                "speedup": timings[best].ms / timing.ms,
                "includes_layout": False,
                "cold_l2": case.decode,
                "temporary_bytes": turns[name][0].temporary_bytes,
                "rel_error": None,
                **case.active(masks[i]),
            }
            if expected is not None and name in contenders:
                row["rel_error"] = relative_error(turns[name][0].call(*calls[0]), expected)
            yield row


def _kernel(case: AttentionCase, sparsity: float) -> str:
    hinted = dataclasses.replace(case.facts, expected_sparsity=sparsity)
    return f"triton {config_for(hinted, 'triton')}"


def _contenders(
    case: AttentionCase, cells: list[tuple[float, MaskKind]]
) -> dict[str, tuple[AttentionImplementation, AttentionConfig | None]]:
    """Dense with zeros, and the kernels that run here with the configs that the hints lead to."""
    found: dict[str, tuple[AttentionImplementation, AttentionConfig | None]] = {
        "dense": ("dense", None)
    }
    for s in sorted({0.0} | {s for s, _ in cells}):
        hinted = dataclasses.replace(case.facts, expected_sparsity=s)
        for implementation in kernels_for(case.facts):
            settings = config_for(hinted, implementation)
            found[f"{implementation} {settings}"] = (implementation, settings)
    return found


def _expected(
    case: AttentionCase, call: tuple[Any, ...], config: AttentionBench
) -> jax.Array | None:
    """The reference on float32 copies, where its `[heads, T, S]` array is small enough."""
    if case.b * case.t * case.s > config.error_pairs:
        return None
    *operands, choice = call
    return jax.jit(case.run("reference"))(*(a.astype(jnp.float32) for a in operands), choice)


def table(rows: list[dict[str, Any]]) -> Table:
    """What dispatch picked, one line a cell."""
    out = Table(title="attention, device time")
    for column in ("op", "rows", "tokens", "slots", "group", "sparsity", "mask", "runs"):
        out.add_column(column)
    for column in ("ms", "dense ms", "x", "TB/s"):
        out.add_column(column, justify="right")
    for row in rows:
        if row["op"] in CASES and row["dispatched"]:
            shape = row["shape"]
            out.add_row(
                CASES[row["op"]],
                *(str(shape[name]) for name in ("b", "t", "tk", "group")),
                f"{row['sparsity']:.2f}",
                row["mask"],
                row["implementation"],
                f"{row['ms']:.4f}",
                f"{row['dense_ms']:.4f}",
                f"{row['speedup']:.2f}",
                f"{row['bytes'] / row['ms'] * 1e-9:.2f}",
            )
    return out
