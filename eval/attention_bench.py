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
from eval.kernel_timing import Compiled, compile_all, time_interleaved
from pallas_kernels._attention.config import AttentionConfig, AttentionImplementation, to_json
from pallas_kernels._attention.dispatch import AttentionOp, choose, config_for, kernels_for
from pallas_kernels._common.testing import relative_error

AT_ONCE = 4  # problems whose contenders are compiled side by side


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


@dataclasses.dataclass(frozen=True)
class AttentionContest:
    """One problem with its operands, every sparsity and mask of it, and the kernels to run."""

    case: AttentionCase
    operands: list[tuple[Any, ...]]
    cells: list[tuple[float, MaskKind, jax.Array]]
    contenders: dict[str, tuple[AttentionImplementation, AttentionConfig | None]]

    def functions(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """The baselines and the contenders, with example arguments."""
        example = (*self.operands[0], self.everything_on())
        found = {name: (run, example) for name, run in self.case.dense().items()}
        for name, (implementation, settings) in self.contenders.items():
            found[name] = (self.case.run(implementation, settings), example)
        return found

    def everything_on(self) -> Any:
        """What the op takes where nothing is skipped."""
        case = self.case
        return case.choice(jnp.ones((case.b * case.t, case.groups), bool))


def contest(case: AttentionCase, measure: Measure) -> AttentionContest:
    """Every sparsity and mask, and dense and every kernel that runs here with its own configs."""
    cells = []
    contenders: dict[str, tuple[AttentionImplementation, AttentionConfig | None]] = {
        "dense": ("dense", None)
    }
    for s in measure.sparsities:
        one_mask = s == 0.0 or case.b * case.t == 1
        for kind in measure.masks[:1] if one_mask else measure.masks:
            cells.append((s, kind, case.mask(kind, s)))
        hinted = dataclasses.replace(case.facts, expected_sparsity=s)
        for implementation in kernels_for(case.facts):
            settings = config_for(hinted, implementation)
            contenders[f"{implementation} {settings}"] = (implementation, settings)
    return AttentionContest(case, case.operands(), cells, contenders)


def attention_records(
    problems: list[AttentionCase], config: AttentionBench, measure: Measure
) -> Iterator[dict[str, Any]]:
    """The records of all problems; the contenders of a few problems are compiled together."""
    for some in itertools.batched(problems, AT_ONCE):
        contests = [contest(case, measure) for case in some]
        functions = {(i, n): f for i, c in enumerate(contests) for n, f in c.functions().items()}
        compiled, failed = compile_all(functions, workers=16)
        for (i, name), error in failed.items():
            raise RuntimeError(f"{some[i]}: {name} does not run") from error
        for i, one in enumerate(contests):
            runs = {name: run for (j, name), run in compiled.items() if i == j}
            yield from contest_records(one, runs, config, measure)


def contest_records(
    one: AttentionContest, compiled: dict[str, Compiled], config: AttentionBench, measure: Measure
) -> Iterator[dict[str, Any]]:
    """Every cell of one problem: every kernel, in turns with the baselines."""
    case = one.case
    for s, kind, mask in one.cells:
        choice = case.choice(mask)
        calls = [(*operands, choice) for operands in one.operands]
        turns = {name: (run, calls) for name, run in compiled.items()}
        baselines = list(case.dense())
        if case.decode:
            full = [(*operands, one.everything_on()) for operands in one.operands]
            name = "triton, all on"
            turns[name] = (compiled[_kernel(case, measure.sparsities[0])], full)
            baselines.append(name)
        timings = time_interleaved(turns, measure.rounds)
        best = min(baselines, key=lambda name: timings[name].ms)
        expected = _expected(case, calls[0], config)
        picked = choose(dataclasses.replace(case.facts, expected_sparsity=s))
        runs = "dense" if picked.config is None else f"{picked.implementation} {picked.config}"
        kept = float(mask.mean())
        for name, timing in timings.items():
            implementation, settings = one.contenders.get(name, (f"{name}, unmasked", None))
            row: dict[str, Any] = {
                "op": case.op,
                "case": CASES[case.op],
                "shape": case.shape,
                "expected_sparsity": s,
                "dtype": case.dtype,
                "sparsity": 1.0 - kept,
                "mask": kind if s > 0.0 else "all_on",
                "implementation": implementation,
                "dispatched": name == runs,
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
                **case.active(mask),
            }
            if expected is not None and name in one.contenders:
                row["rel_error"] = relative_error(turns[name][0].call(*calls[0]), expected)
            yield row


def _kernel(case: AttentionCase, sparsity: float) -> str:
    hinted = dataclasses.replace(case.facts, expected_sparsity=sparsity)
    return f"triton {config_for(hinted, 'triton')}"


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
