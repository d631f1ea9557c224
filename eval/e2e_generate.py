"""What a caller of `generate` waits for: the first token, and each one after it.

The programs are those that the benchmark times by themselves; here everything else is in it that a
call has: arguments checked and moved, sampling, log-probabilities, accounting, the way back.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import jax
import numpy as np
from jaxtyping import Int

from eval.e2e_runs import Variant
from wide_jax.accounting import StepUsage, Usage
from wide_jax.engine import split_on
from wide_jax.generate import Generation, Prepared, generate
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.model import WideForCausalLM
from wide_jax.routing import Argmax

Waiting = Literal["ttft", "tpot"]  # for the first token, and for each one after it
WAITING: tuple[Waiting, ...] = get_args(Waiting)


@dataclasses.dataclass(frozen=True)
class Waited:
    """One variant: milliseconds of every turn, and what its masks skipped (None: not routed)."""

    variant: Variant
    samples_ms: Mapping[Waiting, tuple[float, ...]]
    usage: Mapping[Waiting, Usage | None]


def routed_variant(model: WideForCausalLM, *, own: bool) -> Variant:
    """The model's routers decide: trained ones with their own hints, random ones with 50 %."""
    every, kernels = Argmax(), Kernels(SparsityHints(0.5, 0.5))
    if own:
        kernels = model.kernels or Kernels()
    return Variant("wide", kernels, every, every, None, "trained" if own else "random_routers")


def time_generate(
    model: WideForCausalLM,
    variants: Sequence[Variant],
    ids: Int[np.ndarray, "B T"],
    *,
    steps: int,
    rounds: int,
    prefill_chunk: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Waited]:
    """Call `generate` for one token and for `steps` more, variant by variant in turns.

    A token after the first takes the difference of the two calls, over `steps`. Calls are greedy
    and never stop early; the first round, which compiles, does not count.

    Args:
        model: its weights; each variant has its own kernels.
        variants: ways to run it, with one routing for prompt and steps.
        ids: prompts of equal length.
        steps: tokens after the first, at least 1.
        rounds: timed turns.
        prefill_chunk: prompts run in pieces of so many tokens; None: at once.
        clock: seconds.
    """
    prompts = ids.tolist()
    config, dtype = model.config, model.model.embed_tokens.weight[...].dtype
    ready = [Prepared(config, dtype, *split_on(model, v.kernels)) for v in variants]

    def timed(index: int, tokens: int) -> tuple[float, Generation]:
        start = clock()
        made = generate(
            ready[index],
            prompts,
            max_new_tokens=tokens,
            routing=variants[index].routing,
            stop_ids=(),
            prefill_chunk=prefill_chunk,
        )
        return 1e3 * (clock() - start), made

    samples: list[dict[Waiting, list[float]]] = [{"ttft": [], "tpot": []} for _ in variants]
    last: dict[int, Generation] = {}
    for turn in range(1 + rounds):
        for index, taken in enumerate(samples):
            first, _ = timed(index, 1)
            whole, last[index] = timed(index, 1 + steps)
            if turn:
                taken["ttft"].append(first)
                taken["tpot"].append((whole - first) / steps)
    return [
        Waited(
            variant,
            {waiting: tuple(taken[waiting]) for waiting in WAITING},
            jax.device_get({"ttft": made.prefill_usage, "tpot": made.decode_usage}),
        )
        for variant, taken, made in zip(variants, samples, last.values(), strict=True)
    ]


def best_dense(found: Sequence[Waited], waiting: Waiting) -> Waited:
    """The faster way to run with everything on, by its median."""
    dense = [one for one in found if one.variant.mask == "none"]
    return min(dense, key=lambda one: statistics.median(one.samples_ms[waiting]))


def step_usage_of(usage: Usage, batch: int) -> StepUsage | None:
    """What steps need not read: of one row what its tokens skip, of several not known here."""
    return StepUsage(usage.tokens, usage.attention, usage.ffn) if batch == 1 else None
