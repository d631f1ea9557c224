"""Measured and ideal speedup of a model at its own masks, on the text that was evaluated.

A prefill of evaluated tokens and decode steps through those that follow them, one sequence at a
time, against the dense model of the same weights: the faster of two ways, the model's own kernels
and XLA's products with cuDNN's attention (float32: all of it XLA's). The ideal is the time if it
fell as the work does (FLOPs in prefill, bytes in decode: `wide_jax.accounting`), from the very
masks that were timed. The end-to-end benchmark is what to quote; this says, beside a quality
figure, whether its sparsity pays on this device.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eval.e2e_runs import (
    CompiledRun,
    Models,
    Phase,
    Variant,
    compile_all,
    dense_variants,
    order,
    run_prefill,
)
from eval.scoring import Ran, element_bytes, full_precision
from wide_jax.accounting import StepUsage, ideal_decode_speedup, ideal_prefill_speedup
from wide_jax.cache import KVCache
from wide_jax.generate import decode_step, prefill
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax, Routing

PHASES: tuple[Phase, ...] = ("prefill", "decode")
SAMPLE_SECONDS = 0.02  # calls are repeated for at least so long: the host is then always ahead


@dataclasses.dataclass(frozen=True)
class SpeedShape:
    """What is timed."""

    tokens: int = 2048
    steps: int = 16  # decode steps after the prompt
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class PhaseSpeed:
    """One phase: of a prefill, or of one decode step."""

    measured: float  # dense_ms / wide_ms
    ideal: float
    dense_ms: float  # of the faster way
    dense: str  # which that was
    wide_ms: float
    samples_ms: dict[str, list[float]]
    skipped: dict[str, float]  # the accounting of the masks that were timed


@dataclasses.dataclass(frozen=True)
class Speedup:
    """Both phases, and what was run."""

    shape: SpeedShape
    prefill: PhaseSpeed
    decode: PhaseSpeed

    def line(self) -> str:
        """One line for people."""
        phases = " | ".join(
            f"{name} {phase.measured:.2f}x (ideal {phase.ideal:.2f}x; {phase.wide_ms:.3f} ms, "
            f"{phase.dense} {phase.dense_ms:.3f})"
            for name, phase in (("prefill", self.prefill), ("decode", self.decode))
        )
        shape = self.shape
        return f"speedup on {shape.tokens:,} tokens and {shape.steps} steps: {phases}"

    def to_json(self) -> dict[str, Any]:
        """Every figure, as plain JSON types."""
        return dataclasses.asdict(self)


def worth_timing(routing: Routing) -> bool:
    """On a GPU, with routers: elsewhere skipping saves no time."""
    return jax.default_backend() == "gpu" and isinstance(routing, Argmax)


def measure_speedup(
    model: WideForCausalLM,
    ids: Sequence[int] | np.ndarray,
    *,
    routing: Routing | None = None,
    shape: SpeedShape | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Speedup:
    """`SpeedMeter.measure` of one text."""
    return SpeedMeter(model, routing=routing, shape=shape, clock=clock).measure(ids)


class SpeedMeter:
    """Times one model, dense and pruned, on one text after the other.

    Texts are brought to one shape, so the programs are compiled for the first and serve all.

    Args:
        model: with the kernels it infers on; its routers decide.
        routing: how the pruned run chooses its groups, by default the routers' argmax.
        shape: prompts are cut to the model's `max_position_embeddings`.
        clock: seconds.
    """

    def __init__(
        self,
        model: WideForCausalLM,
        *,
        routing: Routing | None = None,
        shape: SpeedShape | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        shape = SpeedShape() if shape is None else shape
        room = model.config.max_position_embeddings - shape.steps
        self._model, self._clock = model, clock
        self._shape = dataclasses.replace(shape, tokens=min(shape.tokens, room))
        self._variants = contenders(model, Argmax() if routing is None else routing)
        self._programs: _Programs | None = None

    def measure(self, ids: Sequence[int] | np.ndarray) -> Speedup:
        """Time both phases, dense and pruned, in turns; times are medians.

        Args:
            ids: `[N]` evaluated tokens: the prompt and the ones that follow. Fewer than
                `tokens + steps` are repeated.

        Raises:
            ValueError: no ids.
        """
        if len(ids) == 0:
            raise ValueError("no token ids: a speedup is measured on the text that was evaluated")
        model, shape = self._model, self._shape
        text = np.resize(np.asarray(ids, np.int32), (1, shape.tokens + shape.steps))
        with full_precision(model):
            samples, ran = self._run(text)
        phases = {name: _phase(model, name, samples[name], ran[name]) for name in PHASES}
        return Speedup(shape, phases["prefill"], phases["decode"])

    def _run(
        self, text: np.ndarray
    ) -> tuple[dict[Phase, dict[str, list[float]]], dict[Phase, Ran]]:
        """Milliseconds of every variant by phase, and what the last variant's masks skipped."""
        model, shape, variants = self._model, self._shape, self._variants
        prompt, steps = jnp.asarray(text[:, : shape.tokens]), jnp.asarray(text[:, shape.tokens :])
        lengths = np.full(1, shape.tokens, np.int32)
        cache = KVCache.empty(model.config, 1, text.shape[1], model.dtype)
        if self._programs is None:
            self._programs = _compile(model, variants, prompt, lengths, steps, cache)
        programs, pruned = self._programs, variants[-1].routing
        asked = programs.ask.call(programs.states[-1], prompt, lengths, steps, cache, pruned)
        used = jax.device_get(asked)
        ran: dict[Phase, Ran] = {
            "prefill": Ran.of(np.ones_like(lengths), lengths, used[0]),
            "decode": Ran.of(lengths + 1, lengths + shape.steps, used[1]),
        }
        samples: dict[Phase, dict[str, list[float]]] = {}
        for phase in PHASES:
            first = (prompt, lengths) if phase == "prefill" else (steps,)
            calls = [
                functools.partial(_call, run, state, first, variant.asks(phase))
                for run, state, variant in zip(
                    programs.runs[phase], programs.states, variants, strict=True
                )
            ]
            taken, cache = _in_turns(calls, cache, shape.repeats, self._clock)
            if phase == "prefill":  # whoever came last: steps follow the pruned prompt
                _, cache = calls[-1](cache)
            cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths))
            scale = 1e3 if phase == "prefill" else 1e3 / shape.steps
            names = (variant.name for variant in variants)
            samples[phase] = {
                name: [scale * seconds for seconds in one]
                for name, one in zip(names, taken, strict=True)
            }
        return samples, ran


@dataclasses.dataclass(frozen=True)
class _Programs:
    """What was compiled, one entry a variant; `ask` is of the last one's masks."""

    states: tuple[nnx.State, ...]
    runs: Mapping[Phase, Sequence[CompiledRun]]
    ask: CompiledRun


def contenders(model: WideForCausalLM, routing: Routing) -> list[Variant]:
    """The ways to run with everything on, and last the pruned one."""
    every = AllOn()
    found = [Variant("dense", model.kernels, every, every, None, "none")]
    if model.kernels is not None:
        if element_bytes(model) == 2:
            found += [one for one in dense_variants() if one.name == "dense-xla"]
        else:  # cuDNN's attention takes 16 bits only
            found.append(Variant("dense-plain", None, every, every, None, "none"))
    return [*found, Variant("wide", model.kernels, routing, routing, None, "trained")]


def _phase(
    model: WideForCausalLM, phase: Phase, samples: dict[str, list[float]], ran: Ran
) -> PhaseSpeed:
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    wide = medians.pop("wide")
    best = min(medians, key=lambda name: medians[name])
    skipped, ideal = ran.accounting(model), 1.0
    if ran.usage is not None and model.wide is not None:
        if phase == "prefill":
            ideal = ideal_prefill_speedup(ran.usage, model.config, model.wide, rows=1)
        else:
            size = element_bytes(model)
            steps = StepUsage.of_one_row(ran.usage)
            ideal = ideal_decode_speedup(
                ran.usage, steps, model.config, model.wide, weight_bytes=size, kv_bytes=size
            )
    return PhaseSpeed(
        measured=medians[best] / wide,
        ideal=ideal,
        dense_ms=medians[best],
        dense=best,
        wide_ms=wide,
        samples_ms=samples,
        skipped=skipped.summary(),
    )


def _compile(
    model: WideForCausalLM,
    variants: Sequence[Variant],
    prompt: jax.Array,
    lengths: np.ndarray,
    steps: jax.Array,
    cache: KVCache,
) -> _Programs:
    """Compile both phases of every variant for arrays of these shapes, side by side."""
    models = Models.of(model)
    splits = [models.split(variant) for variant in variants]
    prefills = [
        (run_prefill, (graphdef, state, prompt, lengths, cache, variant.routing))
        for (graphdef, state), variant in zip(splits, variants, strict=True)
    ]
    decodes = [
        (_run_steps, (graphdef, state, steps, cache, variant.step_routing))
        for (graphdef, state), variant in zip(splits, variants, strict=True)
    ]
    asked = (_ask, (*splits[-1], prompt, lengths, steps, cache, variants[-1].routing))
    *compiled, ask = compile_all([*prefills, *decodes, asked], together=True)
    count = len(variants)
    runs: dict[Phase, Sequence[CompiledRun]] = {
        "prefill": compiled[:count],
        "decode": compiled[count:],
    }
    return _Programs(tuple(state for _, state in splits), runs, ask)


def _call(run: CompiledRun, state, first: tuple[Any, ...], routing: Routing, cache: KVCache):
    return run.call(state, *first, cache, routing)


def _in_turns(
    calls: Sequence[Callable[[KVCache], tuple[Any, KVCache]]],
    cache: KVCache,
    repeats: int,
    clock: Callable[[], float],
) -> tuple[list[list[float]], KVCache]:
    """Seconds of each call, `repeats` samples in turns, and the cache as the last one left it.

    A sample is the mean of several calls that follow each other without waiting; who follows whom
    is another every turn (`e2e_runs.order`).
    """

    def sample(call, count: int, cache: KVCache) -> tuple[float, KVCache]:
        start = clock()
        for _ in range(count):
            _, cache = call(cache)
        jax.block_until_ready(cache)
        return (clock() - start) / count, cache

    fastest = float("inf")
    for _ in range(2):  # a first call also loads its program
        for call in calls:
            seconds, cache = sample(call, 1, cache)
            fastest = min(fastest, seconds)
    count = max(1, round(SAMPLE_SECONDS / max(fastest, 1e-9)))
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        for index in order(len(calls), turn):
            seconds, cache = sample(calls[index], count, cache)
            taken[index].append(seconds)
    return taken, cache


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def _run_steps(graphdef, state, tokens, cache, routing):
    """A decode step for each of `tokens[1, steps]`: the last drawn token, and the cache with its
    first length again.
    """
    active = jnp.ones(1, bool)

    def step(i, carried):
        _, cache = carried
        logits, cache, _ = decode_step(graphdef, state, tokens[:, i], active, cache, routing)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    drawn, after = jax.lax.fori_loop(0, tokens.shape[1], step, (tokens[:, 0], cache))
    return drawn, dataclasses.replace(after, lengths=cache.lengths)


@functools.partial(jax.jit, static_argnames="graphdef")
def _ask(graphdef, state, prompt, lengths, tokens, cache, routing):
    """What the masks of the prompt and of the steps after it skip."""
    _, cache, prefilled = prefill(graphdef, state, prompt, lengths, cache, routing, fresh=True)
    active = jnp.ones(1, bool)

    def step(cache, token):
        _, cache, used = decode_step(graphdef, state, token, active, cache, routing)
        return cache, used

    _, each = jax.lax.scan(step, cache, tokens.T)
    return prefilled, jax.tree.map(lambda x: x.sum(axis=0), each)
