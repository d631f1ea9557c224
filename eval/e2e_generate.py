"""What a caller of `generate` waits for: the first token, and each one after it.

The programs are those that the benchmark times by themselves; here everything else is in it that a
call has: arguments checked and moved, sampling, log-probabilities, accounting, the way back.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jaxtyping import Int

from eval.e2e_runs import Models, Variant, turns
from wide_jax.accounting import Usage
from wide_jax.generate import Generation, Prepared, generate
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.model import WideForCausalLM
from wide_jax.routing import Argmax

Waiting = Literal["ttft", "tpot"]  # for the first token, and for each one after it
WAITING: tuple[Waiting, ...] = get_args(Waiting)


@dataclasses.dataclass(frozen=True)
class Waited:
    """One variant: milliseconds of every turn, and what its masks skipped (None: not routed).

    That of the tokens after the first is of all of them, the half that is not timed included.
    """

    samples_ms: Mapping[Waiting, tuple[float, ...]]
    usage: Mapping[Waiting, Usage | None]


def routed_variant(model: WideForCausalLM, *, own: bool) -> Variant:
    """The model's routers decide: trained ones with their own hints, random ones with 50 %."""
    every, kernels = Argmax(), Kernels(SparsityHints(0.5, 0.5))
    if own:
        kernels = model.kernels or Kernels()
    return Variant("wide", kernels, every, every, None, "trained" if own else "random_routers")


def time_generate(
    models: Models,
    variants: Sequence[Variant],
    ids: Int[np.ndarray, "B T"],
    *,
    steps: int,
    rounds: int,
    seconds: float,
    prefill_chunk: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Waited]:
    """Call `generate` for one token, and for `2 * steps`, variant by variant in turns.

    Of the second call its second half counts, from the callback after `steps` tokens to the one
    after all: two calls' difference would have the spread of their prompts in it. Calls are greedy
    and never stop early; calls before the first turn compile.

    Args:
        models: with and without routers; each variant has its own kernels.
        variants: ways to run, with one routing for prompt and steps.
        ids: prompts of equal length.
        steps: tokens that are timed, at least 1.
        rounds: timed turns, 3 at least.
        seconds: fewer turns, but 3, where they would take longer.
        prefill_chunk: prompts run in pieces of so many tokens; None: at once.
        clock: seconds.
    """
    prompts = ids.tolist()
    ready = [Prepared(models.routed.config, *models.split(variant)) for variant in variants]

    def call(index: int, tokens: int, **options: Any) -> tuple[float, Generation]:
        start = clock()
        made = generate(
            ready[index],
            prompts,
            max_new_tokens=tokens,
            routing=variants[index].routing,
            stop_ids=(),
            prefill_chunk=prefill_chunk,
            **options,
        )
        return clock() - start, made

    # Compiled before the rounds, or the first would last too long for a second one to warm up; and
    # not side by side: XLA ends the process where one thread compiles while another captures.
    for index in range(len(variants)):
        for tokens in (1, 2 * steps):
            call(index, tokens)
    samples: list[dict[Waiting, list[float]]] = [{"ttft": [], "tpot": []} for _ in variants]
    last: dict[int, Generation] = {}
    for counts, order in turns(len(variants), rounds, seconds, clock):
        for index in order:
            taken = samples[index]
            seen: list[float] = []
            first, _ = call(index, 1)
            _, last[index] = call(
                index, 2 * steps, on_tokens=lambda _, seen=seen: seen.append(clock()),
                stream_every=steps,
            )  # fmt: skip
            if counts:
                taken["ttft"].append(1e3 * first)
                taken["tpot"].append(1e3 * (seen[1] - seen[0]) / steps)
    return [
        Waited(
            {waiting: tuple(taken[waiting]) for waiting in WAITING},
            jax.device_get({"ttft": last[index].prefill_usage, "tpot": last[index].decode_usage}),
        )
        for index, taken in enumerate(samples)
    ]
