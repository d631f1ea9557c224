"""Measured and ideal speedup of a model at its own masks, against the same model with all on.

Ideal: the time if it fell as the work does, total included: FLOPs in prefill, bytes in decode
(`wide_jax.accounting`).
Measured on random ids in the shapes below; masks are the routers' for those ids, and the ideal is
computed from the very same masks. The end-to-end benchmark is what to quote; this says, beside a
quality figure, whether its sparsity pays on this device.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eval.scoring import Ran, element_dtype, full_precision
from wide_jax.accounting import ideal_prefill_speedup
from wide_jax.cache import KVCache
from wide_jax.generate import decode_step, prefill
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Routing


@dataclasses.dataclass(frozen=True)
class SpeedShape:
    """What is timed."""

    batch: int = 1
    tokens: int = 2048
    steps: int = 16  # decode steps after the prompt
    repeats: int = 5


def measure_speedup(
    model: WideForCausalLM, *, routing: Routing, shape: SpeedShape | None = None
) -> dict[str, Any]:
    """Prefill and decode: `{"measured", "ideal", "dense_ms", "wide_ms", "samples_ms"}` each.

    Times are medians of `repeats` runs after one that compiles. Prompts are cut to the model's
    `max_position_embeddings`.
    """
    shape = SpeedShape() if shape is None else shape
    room = model.config.max_position_embeddings - shape.steps
    shape = dataclasses.replace(shape, tokens=min(shape.tokens, room))
    runs = {"dense": _time(model, AllOn(), shape), "wide": _time(model, routing, shape)}
    result: dict[str, Any] = {"shape": dataclasses.asdict(shape)}
    for phase in ("prefill", "decode"):
        dense, wide = (statistics.median(runs[name][phase]) for name in ("dense", "wide"))
        result[phase] = {
            "measured": dense / wide,
            "ideal": _ideal(model, phase, runs["wide"]["ran"][phase], shape.batch),
            "dense_ms": dense,
            "wide_ms": wide,
            "samples_ms": {name: runs[name][phase] for name in runs},
        }
    return result


def _ideal(model: WideForCausalLM, phase: str, ran: Ran, rows: int) -> float:
    if ran.usage is None or model.wide is None:
        return 1.0
    if phase == "prefill":
        return ideal_prefill_speedup(ran.usage, model.config, model.wide, rows)
    return 1 / (1 - ran.accounting(model).bytes_total)


def _time(model: WideForCausalLM, routing: Routing, shape: SpeedShape) -> dict[str, Any]:
    """Samples in ms of a prefill and of one decode step (mean over `steps`), and what ran."""
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, (shape.batch, shape.tokens)).astype(np.int32)
    lengths = np.full(shape.batch, shape.tokens, np.int32)
    active = jnp.ones(shape.batch, bool)
    samples: dict[str, list[float]] = {"prefill": [], "decode": []}
    ran = {"prefill": Ran(), "decode": Ran()}
    for repeat in range(shape.repeats + 1):
        cache = KVCache.empty(
            model.config, shape.batch, shape.tokens + shape.steps, element_dtype(model)
        )
        jax.block_until_ready(cache)

        def run_prefill(cache=cache):
            return prefill(graphdef, state, ids, lengths, cache, routing, fresh=True)

        with full_precision(model):
            (logits, cache, used), spent = _timed(run_prefill)
            ran["prefill"] = Ran.of(np.ones_like(lengths), lengths, used)
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)

            def run_decode(token=token, cache=cache):
                every = []
                for _ in range(shape.steps):
                    logits, cache, used = decode_step(
                        graphdef, state, token, active, cache, routing
                    )
                    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
                    every.append(used)
                return token, every

            (_, every), decode_spent = _timed(run_decode)
        total = None
        for used in every:
            if used is not None:
                total = used.to_host() if total is None else total + used.to_host()
        ran["decode"] = Ran.of(lengths + 1, lengths + shape.steps, total)
        if repeat > 0:  # the first one compiles
            samples["prefill"].append(spent)
            samples["decode"].append(decode_spent / shape.steps)
    return samples | {"ran": ran}


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, ready, and the milliseconds it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, 1e3 * (time.perf_counter() - start)
