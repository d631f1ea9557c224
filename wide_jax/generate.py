"""Jitted generation: prefill, decode step, and the loop over them that stays on the device.

`generate` is the convenient way; `prefill` and `decode_step` are its two compiled parts, public for
loops of one's own. Rows are aligned to the left before anything runs, so padding side, batch and
cache length cannot change a row's result.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels._common.forms import next_power_of_two
from wide_jax.accounting import Usage, usage
from wide_jax.batch import TokenBatch
from wide_jax.cache import KVCache
from wide_jax.config import ModelConfig
from wide_jax.model import ModelOutput, WideForCausalLM
from wide_jax.routing import Argmax, Routing
from wide_jax.sampling import Sampler, check_temperature, sample
from wide_jax.structure import split

SMALLEST_BUCKET = 16  # prompts are padded to powers of two from here on: one compile a bucket


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` made, on the host.

    Attributes:
        tokens: int32 `[B, N]`, the new tokens of every row; after a row's end, the pad id.
        lengths: int32 `[B]`, new tokens a row, its stop token included.
        log_probs: float32 `[B, N]`, of the chosen tokens under the unfiltered distribution;
            0 after a row's end.
        steps: tokens drawn by the longest row; no forward pass ran beyond it.
        prefill_usage, decode_usage: what the masks of each phase skipped; None without masks.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    steps: int
    prefill_usage: Usage | None
    decode_usage: Usage | None

    def rows(self) -> list[list[int]]:
        """Each row's new tokens, without padding."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model as it is now, for many calls of `generate`: what changes in it later is not seen.

    Each call looks through all modules otherwise: tens of milliseconds of the host for 32 layers,
    as long as a GPU takes for a prompt of 1,024 tokens.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    state: nnx.State

    @classmethod
    def of(cls, model: WideForCausalLM) -> "Prepared":
        """Split the model, as `wide_jax.structure.split` does."""
        return cls(model.config, *split(model))

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, and so of the cache."""
        weight: Any = self.state["model"]["embed_tokens"]["weight"]
        return weight.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The loop's state. `token` is drawn but not yet in the cache."""

    cache: KVCache
    token: Int[Array, "B"]
    step: Int[Array, ""]  # tokens drawn so far
    done: Bool[Array, "B"]
    finite: Bool[Array, "B"]  # False once a row met a logit that was NaN or infinite
    tokens: Int[Array, "B N"]
    log_probs: Float[Array, "B N"]
    lengths: Int[Array, "B"]
    seen: Bool[Array, "B V"] | None
    usage: Usage | None


@functools.partial(jax.jit, static_argnames=("graphdef", "fresh"), donate_argnames="cache")
def prefill(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    input_ids: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    cache: KVCache,
    routing: Routing,
    *,
    fresh: bool = False,
) -> tuple[Float[Array, "B V"], KVCache, Usage | None]:
    """Run `lengths[b]` prompt tokens of every row (left-aligned) and fill the cache.

    The cache may already hold earlier tokens of the rows (chunked prefill, a cached prefix); with
    `fresh` the caller promises that it holds none, and a GPU's attention reads fewer bytes. It
    must have room for `cache.lengths + lengths` tokens: `KVCache.check_room` says so before.

    Returns:
        Logits after each row's last token, the cache, and what the masks skipped.
    """
    model = nnx.merge(graphdef, state)
    columns = jnp.arange(input_ids.shape[1], dtype=jnp.int32)[None, :]
    real = columns < lengths[:, None]
    batch = TokenBatch(input_ids, cache.lengths[:, None] + columns, real.astype(jnp.int32))
    output = model(batch, routing, cache=cache, fresh=fresh)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, last, axis=1)[:, 0]
    return model.logits(hidden), _cache_of(output), _usage_of(model, output, batch)


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def decode_step(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    token: Int[Array, "B"],
    active: Bool[Array, "B"],
    cache: KVCache,
    routing: Routing,
) -> tuple[Float[Array, "B V"], KVCache, Usage | None]:
    """Run one token of every active row; the others' caches and counts stay as they are.

    Returns:
        Logits after the token (arbitrary for inactive rows), the cache, what the masks skipped.
    """
    model = nnx.merge(graphdef, state)
    batch = TokenBatch(token[:, None], cache.lengths[:, None], active[:, None].astype(jnp.int32))
    output = model(batch, routing, cache=cache)
    return model.logits(output.hidden[:, 0]), _cache_of(output), _usage_of(model, output, batch)


Forward = Callable[
    [Int[Array, "B"], Bool[Array, "B"], KVCache], tuple[Array, KVCache, Usage | None]
]


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """What a compiled decode loop is specialised to."""

    sampler: Sampler
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int


def first_draw(
    logits: Float[Array, "B V"],
    cache: KVCache,
    keys: Key[Array, "B"],
    temperature: Float[Array, "B"],
    settings: DecodeSettings,
    *,
    seen: Bool[Array, "B V"] | None,
    no_usage: Usage | None,
) -> DecodeState:
    """The loop's state after drawing every row's first token from the prompt's logits.

    `no_usage` is the zero that usage adds up from; `seen` marks the prompt's tokens where a
    repetition penalty needs them.
    """
    rows = logits.shape[0]
    empty = DecodeState(
        cache=cache,
        token=jnp.zeros((rows,), jnp.int32),
        step=jnp.int32(0),
        done=jnp.zeros((rows,), bool),
        finite=jnp.ones((rows,), bool),
        tokens=jnp.full((rows, settings.max_new_tokens), settings.pad_id, jnp.int32),
        log_probs=jnp.zeros((rows, settings.max_new_tokens), jnp.float32),
        lengths=jnp.zeros((rows,), jnp.int32),
        seen=seen,
        usage=no_usage,
    )
    return _draw(logits, empty, keys, temperature, settings)


def decode_until(
    forward: Forward,
    state: DecodeState,
    keys: Key[Array, "B"],
    temperature: Float[Array, "B"],
    settings: DecodeSettings,
    limit: Int[Array, ""],
) -> DecodeState:
    """Draw on until `limit` tokens a row, `max_new_tokens`, or every row's end.

    `forward(token, active, cache)` is one decode step. A row's draw number i uses its key with i
    folded in, whatever the other rows do, so pieces of any size give the same tokens.
    """
    last = jnp.minimum(limit, settings.max_new_tokens)

    def unfinished(state: DecodeState) -> Bool[Array, ""]:
        return (state.step < last) & ~state.done.all()

    def advance(state: DecodeState) -> DecodeState:
        logits, cache, used = forward(state.token, ~state.done, state.cache)
        total = _sum(state.usage, used)
        advanced = dataclasses.replace(state, cache=cache, usage=total)
        return _draw(logits, advanced, keys, temperature, settings)

    return jax.lax.while_loop(unfinished, advance, state)


def _draw(
    logits: Float[Array, "B V"],
    state: DecodeState,
    keys: Key[Array, "B"],
    temperature: Float[Array, "B"],
    settings: DecodeSettings,
) -> DecodeState:
    active = ~state.done
    step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
    token, log_prob, finite = sample(logits, step_keys, temperature, settings.sampler, state.seen)
    ended = jnp.zeros_like(state.done)
    if settings.stop_ids:
        ended = jnp.isin(token, jnp.array(settings.stop_ids, jnp.int32))
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(token.shape[0]), token].max(active)
    bad = active & ~finite
    shown = jnp.where(active, token, settings.pad_id)
    return dataclasses.replace(
        state,
        token=token,
        step=state.step + 1,
        done=state.done | ended | bad,
        finite=state.finite & ~bad,
        tokens=state.tokens.at[:, state.step].set(shown),
        log_probs=state.log_probs.at[:, state.step].set(jnp.where(active, log_prob, 0.0)),
        lengths=state.lengths + active.astype(jnp.int32),
        seen=seen,
    )


def generate(
    model: WideForCausalLM | Prepared,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    routing: Routing | None = None,
    sampler: Sampler | None = None,
    temperatures: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    prefill_chunk: int | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    stream_every: int = 8,
) -> Generation:
    """Continue every prompt.

    Args:
        model: with routers for the default routing; `Prepared.of(model)` where it is called often.
        prompts: token ids of each row, of any lengths, each with at least one token.
        max_new_tokens: a row ends here at the latest.
        routing: how groups are chosen; by default the routers' argmax.
        sampler: how tokens are drawn; by default greedily.
        temperatures: one per row, instead of the sampler's.
        seeds: one per row, by default 0, 1, 2, ...; a row's tokens depend on its own only.
        stop_ids: tokens that end a row; by default the model's end-of-sequence ids.
        prefill_chunk: run prompts in pieces of so many tokens, to bound the memory of their
            activations; the cache has slots for a power of two of pieces.
        on_tokens: called with each row's newest tokens, every `stream_every` steps; without it the
            whole loop stays on the device.
        stream_every: steps between two calls of `on_tokens`.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, lists of unequal lengths, or
            prompt and new tokens together beyond the model's `max_position_embeddings`.
        FloatingPointError: a row's logits were NaN or infinite; the message names the row and the
            step.
    """
    ready = model if isinstance(model, Prepared) else Prepared.of(model)
    config, graphdef, state = ready.config, ready.graphdef, ready.state
    sampler = Sampler() if sampler is None else sampler
    seeds = list(range(len(prompts))) if seeds is None else list(seeds)
    temps = [sampler.temperature] * len(prompts) if temperatures is None else list(temperatures)
    _check_request(config, prompts, max_new_tokens, seeds, temps, prefill_chunk, stream_every)
    stops = tuple(config.eos_token_ids if stop_ids is None else stop_ids)
    routing = Argmax() if routing is None else routing

    longest = max(map(len, prompts))
    width, capacity = padded_sizes(longest, max_new_tokens, prefill_chunk)
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)

    cache = KVCache.empty(config, len(prompts), capacity, ready.dtype)
    logits, cache, prefilled = _prefill_in_chunks(
        graphdef, state, ids, lengths, cache, routing, prefill_chunk or width
    )
    settings = DecodeSettings(
        sampler=sampler,
        max_new_tokens=max_new_tokens,
        stop_ids=stops,
        pad_id=0 if config.pad_token_id is None else config.pad_token_id,
    )
    temperature = np.array(temps, np.float32)
    seen = None
    if sampler.repetition_penalty != 1:
        seen = _seen_tokens(ids, lengths, config.vocab_size)
    decoding, keys = _first_draw(
        logits, cache, np.array(seeds, np.int32), temperature, settings, seen, prefilled
    )
    shown, piece = 0, max_new_tokens if on_tokens is None else stream_every
    for limit in range(piece, max_new_tokens + piece, piece):
        if min(limit, max_new_tokens) > 1:  # one token is drawn already
            decoding = _decode_until(
                graphdef, state, decoding, routing, keys, temperature, settings, np.int32(limit)
            )
        if on_tokens is None:
            continue
        new, counts, done = jax.device_get((decoding.tokens, decoding.lengths, decoding.done))
        on_tokens([row[shown:n].tolist() for row, n in zip(new, counts, strict=True)])
        shown = limit
        if done.all():
            break
    return _on_host(decoding, prefilled)


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="cache")
def _first_draw(logits, cache, seeds, temperature, settings, seen, prefilled):
    """The loop's state and the rows' keys: one program, where operations of their own are slow."""
    keys = jax.vmap(jax.random.key)(seeds)
    none = jax.tree.map(jnp.zeros_like, prefilled)
    drawn = first_draw(logits, cache, keys, temperature, settings, seen=seen, no_usage=none)
    return drawn, keys


@functools.partial(jax.jit, static_argnames=("graphdef", "settings"), donate_argnames="decoding")
def _decode_until(graphdef, state, decoding, routing, keys, temperature, settings, limit):
    def forward(token, active, cache):
        return decode_step(graphdef, state, token, active, cache, routing)

    return decode_until(forward, decoding, keys, temperature, settings, limit)


def _on_host(state: DecodeState, prefilled: Usage | None) -> Generation:
    """Raises FloatingPointError for a row whose logits were not finite."""
    made = (state.tokens, state.lengths, state.log_probs, state.step, state.finite, state.usage)
    tokens, lengths, log_probs, steps, finite, decoded = jax.device_get(made)
    if not finite.all():
        row = int(np.argmin(finite))
        raise FloatingPointError(
            f"row {row}: the logits of new token {lengths[row] - 1} are not finite; "
            "check the weights and the dtype"
        )
    return Generation(tokens, lengths, log_probs, int(steps), prefilled, decoded)


def _prefill_in_chunks(graphdef, state, ids, lengths, cache, routing, chunk):
    """Prefill piece by piece; a row's logits are those of the piece its prompt ends in."""
    logits, total = None, None
    for start in range(0, ids.shape[1], chunk):
        inside = np.clip(lengths - start, 0, chunk)
        piece, cache, used = prefill(
            graphdef,
            state,
            ids[:, start : start + chunk],
            inside,
            cache,
            routing,
            fresh=start == 0,
        )
        if logits is None:
            logits, total = piece, used
        else:
            logits = jnp.where((inside > 0)[:, None], piece, logits)
            total = _sum(total, used)
    return logits, cache, total


def _sum(total: Usage | None, part: Usage | None) -> Usage | None:
    return part if total is None or part is None else total + part


def _cache_of(output: ModelOutput) -> KVCache:
    assert output.cache is not None  # a forward pass that is given a cache returns one
    return output.cache


def _usage_of(model: WideForCausalLM, output: ModelOutput, batch: TokenBatch) -> Usage | None:
    if output.masks is None:
        return None
    return usage(output.masks, batch.real, batch.positions + 1, model.config)


def _seen_tokens(ids: np.ndarray, lengths: np.ndarray, vocab_size: int) -> Array:
    seen = np.zeros((len(ids), vocab_size), bool)
    for row, length in enumerate(lengths):
        seen[row, ids[row, :length]] = True
    return jnp.asarray(seen)


def padded_sizes(
    longest: int, max_new_tokens: int, prefill_chunk: int | None = None
) -> tuple[int, int]:
    """Tokens that `generate` pads its prompts to, and the slots of its cache.

    In pieces no more of them run than the prompts have; the cache, for which the program of a piece
    is compiled, is padded to a power of two of them.
    """
    if prefill_chunk is None:
        width = room = _bucket(longest)
    else:
        pieces = -(-longest // prefill_chunk)
        width, room = pieces * prefill_chunk, next_power_of_two(pieces) * prefill_chunk
    return width, room + _bucket(max_new_tokens)


def _bucket(length: int) -> int:
    return max(SMALLEST_BUCKET, next_power_of_two(length))


def _check_request(
    config, prompts, max_new_tokens, seeds, temperatures, prefill_chunk, stream_every
) -> None:
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    for name, values in (("seeds", seeds), ("temperatures", temperatures)):
        if len(values) != len(prompts):
            raise ValueError(f"{name} has {len(values)} entries for {len(prompts)} prompts")
    for temperature in temperatures:
        check_temperature(temperature)
    counts = {"max_new_tokens": max_new_tokens, "stream_every": stream_every}
    for name, value in {**counts, "prefill_chunk": prefill_chunk}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    check_prompts(config, prompts, max_new_tokens)


def check_prompts(
    config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Raise what `generate` would for these prompts: it needs no weights.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or prompt and new tokens together
            beyond the model's `max_position_embeddings`.
    """
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} has no tokens: begin it with a start token at least")
        outside = [token for token in prompt if not 0 <= token < config.vocab_size]
        if outside:
            raise ValueError(
                f"prompt {row}: token id {outside[0]} is outside the vocabulary "
                f"(vocab_size={config.vocab_size}); does the tokenizer belong to the model?"
            )
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} "
                f"it passes max_position_embeddings={config.max_position_embeddings}"
            )
