"""Continuations with stop strings, as the harness's generation tasks need them.

`wide_jax.generate` knows stop ids only; here a jitted loop draws a few tokens at a time and the
host looks for stop strings in between.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from eval.scoring import Ran, bucket, full_precision
from wide_jax.accounting import Usage
from wide_jax.cache import KVCache
from wide_jax.generate import decode_step, prefill
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Routing
from wide_jax.sampling import Sampler, sample
from wide_jax.structure import split

CHUNK = 16  # tokens drawn between two looks at the text


@dataclasses.dataclass(frozen=True)
class Continuation:
    """New tokens of every row (stop id included), and what ran in each phase."""

    tokens: list[list[int]]
    prefill: Ran
    decode: Ran


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loop:
    logits: Float[Array, "B V"]
    cache: KVCache
    done: Bool[Array, "B"]
    finite: Bool[Array, "B"]
    drawn: Int[Array, ""]
    tokens: Int[Array, "B N"]  # of this chunk
    usage: Usage | None


def continue_prompts(
    model: WideForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    stopped: Callable[[list[int]], bool],
    routing: Routing,
    sampler: Sampler | None = None,
    seeds: Sequence[int] | None = None,
    rows: int | None = None,
) -> Continuation:
    """Continue every prompt until a stop id, `stopped(its new tokens)`, or `max_new_tokens`.

    `stopped` is asked every `CHUNK` tokens, so a row may hold a few more than it needs; the
    caller cuts its text.

    Args:
        model: the model.
        prompts: ids of each row, one at least.
        max_new_tokens: a row ends here at the latest.
        stop_ids: a row ends after one of them.
        stopped: whether a row's text so far ends it.
        routing: how groups are chosen.
        sampler: by default greedy.
        seeds: one a row; a row's tokens depend on its own seed only. By default 0.
        rows: pad the batch with empty rows up to this many, to keep one compiled shape.

    Raises:
        ValueError: an empty prompt, or prompt and new tokens beyond `max_position_embeddings`.
        FloatingPointError: a row's logits are not finite.
    """
    sampler = Sampler() if sampler is None else sampler
    limit, longest = model.config.max_position_embeddings, max(map(len, prompts))
    if min(map(len, prompts)) < 1:
        raise ValueError("a prompt has no tokens: start it with the model's BOS token")
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens=} are more than the model's "
            f"max_position_embeddings={limit}"
        )
    count = len(prompts) if rows is None else max(rows, len(prompts))
    width = bucket(longest, limit)
    ids, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    keys = jax.vmap(jax.random.key)(
        jnp.array([*(seeds or [0] * len(prompts)), *[0] * (count - len(prompts))], jnp.uint32)
    )
    graphdef, state = split(model)
    capacity = width + -(-max_new_tokens // CHUNK) * CHUNK
    cache = KVCache.empty(model.config, count, capacity, model.dtype)
    with full_precision(model):
        logits, cache, used = prefill(graphdef, state, ids, lengths, cache, routing, fresh=True)
        real = lengths[: len(prompts)]
        prefilled = Ran.of(np.ones_like(real), real, _host(used))
        done = np.arange(count) >= len(prompts)
        tokens: list[list[int]] = [[] for _ in prompts]
        decoded = Ran()
        for start in range(0, max_new_tokens, CHUNK):
            size = min(CHUNK, max_new_tokens - start)
            loop = _draw_chunk(
                graphdef,
                state,
                logits,
                cache,
                done,
                jax.vmap(jax.random.fold_in, (0, None))(keys, start),
                jnp.int32(size),
                routing,
                sampler=sampler,
                stop_ids=tuple(stop_ids),
            )
            logits, cache = loop.logits, loop.cache
            new, drawn, finite = jax.device_get((loop.tokens, loop.drawn, loop.finite))
            seen = lengths[: len(prompts)] + [len(row) for row in tokens]
            for row in np.flatnonzero(~done):
                ended = np.flatnonzero(np.isin(new[row, :drawn], list(stop_ids)))
                tokens[row] += new[row, : ended[0] + 1 if len(ended) else drawn].tolist()
                done[row] = len(ended) > 0 or stopped(tokens[row])
                if not finite[row]:
                    raise FloatingPointError(
                        f"row {row}: the logits of a new token are not finite; check the weights "
                        "(wide check) and the dtype"
                    )
            now = lengths[: len(prompts)] + [_forwards(row, stop_ids) for row in tokens]
            decoded = decoded + Ran.of(seen + 1, np.maximum(now, seen), _host(loop.usage))
            if done.all():
                break
    return Continuation(tokens, prefilled, decoded)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "sampler", "stop_ids"), donate_argnames="cache"
)
def _draw_chunk(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    logits: Float[Array, "B V"],
    cache: KVCache,
    done: Bool[Array, "B"],
    keys: Key[Array, "B"],
    size: Int[Array, ""],
    routing: Routing,
    *,
    sampler: Sampler,
    stop_ids: tuple[int, ...],
) -> _Loop:
    """Draw up to `size` tokens a row; each token that is no stop id also runs."""
    rows = logits.shape[0]
    temperature = jnp.full((rows,), sampler.temperature, jnp.float32)

    def forward(token, active, cache):
        return decode_step(graphdef, state, token, active, cache, routing)

    def draw(loop: _Loop) -> _Loop:
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, loop.drawn)
        token, _, finite = sample(loop.logits, step_keys, temperature, sampler)
        done = loop.done | jnp.isin(token, jnp.array(stop_ids, jnp.int32))
        logits, cache, used = forward(token, ~done, loop.cache)
        return _Loop(
            logits,
            cache,
            done,
            loop.finite & (finite | loop.done),
            loop.drawn + 1,
            loop.tokens.at[:, loop.drawn].set(token),
            None if used is None else loop.usage + used,
        )

    start = _Loop(
        logits,
        cache,
        done,
        jnp.ones((rows,), bool),
        jnp.int32(0),
        jnp.zeros((rows, CHUNK), jnp.int32),
        _no_usage(nnx.merge(graphdef, state), routing),
    )
    return jax.lax.while_loop(lambda loop: (loop.drawn < size) & ~loop.done.all(), draw, start)


def _no_usage(model: WideForCausalLM, routing: Routing) -> Usage | None:
    """The zero that a loop's usage adds up from; None where nothing is routed."""
    if isinstance(routing, AllOn) or model.wide is None:
        return None
    layers = jnp.zeros((model.config.num_hidden_layers,), jnp.float32)
    return Usage(
        jnp.float32(0),
        *[layers] * 5,
        attn_groups=model.wide.attn_groups(model.config),
        ffn_groups=model.wide.ffn_groups(model.config),
    )


def _forwards(tokens: list[int], stop_ids: Sequence[int]) -> int:
    """Tokens of a row that ran: all but a stop id at its end."""
    return len(tokens) - (bool(tokens) and tokens[-1] in stop_ids)


def _host(used: Usage | None) -> Usage | None:
    return None if used is None else used.to_host()
