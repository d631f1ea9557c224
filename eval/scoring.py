"""Log-probabilities of given tokens, with what the masks skipped while computing them.

The one loop under perplexity and the harness: rows are padded on the right to a few lengths (one
compile each), batches are filled up with empty rows, and no row's result depends on its batch.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eval.windows import Window
from wide_jax.accounting import Usage, usage
from wide_jax.batch import TokenBatch
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax, Routing

SHORTEST_BUCKET = 32
LOGITS_CHUNK = 512  # tokens whose logits exist at once: 512 x 128,256 x float32 = 263 MB


@dataclasses.dataclass(frozen=True)
class Score:
    """One window's result on the host."""

    log_probs: np.ndarray  # float32 [scored targets], nats
    greedy: np.ndarray  # bool [scored targets]: the target had the highest logit


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """The windows of one device batch: their numbers in the caller's list, and their results."""

    indices: tuple[int, ...]
    scores: tuple[Score, ...]
    usage: Usage | None  # float64, over every real token that ran; None: nothing was routed


def default_routing(model: WideForCausalLM) -> Routing:
    """Argmax with routers, everything on without."""
    return AllOn() if model.wide is None else Argmax()


def element_bytes(model: WideForCausalLM) -> int:
    """Size of a stored weight (and of a cached key or value) of this model, in bytes."""
    return jnp.dtype(model.model.embed_tokens.weight[...].dtype).itemsize


def bucket(length: int, limit: int) -> int:
    """The padded length of a row: 32, 48, 64, 96, 128, 192 ... but no more than `limit`."""
    size = SHORTEST_BUCKET
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, max(limit, length))


def score_windows(
    model: WideForCausalLM,
    windows: Sequence[Window],
    *,
    routing: Routing,
    batch_size: int,
    limit: int,
) -> Iterator[ScoredBatch]:
    """Score every window once, longest first (so that the largest memory need comes first).

    Args:
        model: the model; float32 ones run at full float32 precision on every device.
        windows: any lengths from 1 to `limit`.
        routing: how groups are chosen.
        batch_size: rows of a device batch.
        limit: the longest row, and the largest padded length.

    Raises:
        ValueError: a window that is empty, longer than `limit` or has ids outside the vocabulary,
            a batch size below 1, a limit beyond the model's `max_position_embeddings`.
    """
    _check(model, windows, batch_size, limit)
    graphdef, state = nnx.split(model)
    buckets: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        buckets.setdefault(bucket(len(window.inputs), limit), []).append(index)
    batches = [
        (width, min(batch_size, len(members)), members[start : start + batch_size])
        for width, members in sorted(buckets.items(), reverse=True)
        for start in range(0, len(members), batch_size)
    ]
    for width, row_count, batch in batches:
        rows = _pad([windows[index] for index in batch], row_count, width)
        with full_precision(model):
            found = score_rows(graphdef, state, *rows, routing)
        log_probs, greedy, used = jax.device_get(found)
        scores = []
        for row, index in enumerate(batch):
            scored = np.flatnonzero(windows[index].scored)
            scores.append(Score(log_probs[row, scored], greedy[row, scored]))
        yield ScoredBatch(tuple(batch), tuple(scores), None if used is None else used.to_host())


@functools.partial(jax.jit, static_argnames="graphdef")
def score_rows(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    routing: Routing,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], Usage | None]:
    """Log-probability of each target after its input, and whether it had the highest logit.

    Logits are in the model's dtype, the log-softmax in float32; only `LOGITS_CHUNK` tokens of
    logits exist at a time. Columns past a row's length hold arbitrary values.
    """
    model = nnx.merge(graphdef, state)
    batch = TokenBatch.from_lengths(inputs, lengths)
    output = model(batch, routing)
    chunk = min(LOGITS_CHUNK, inputs.size)
    pad = -inputs.size % chunk
    hidden = jnp.pad(output.hidden.reshape(inputs.size, -1), ((0, pad), (0, 0)))
    wanted = jnp.pad(targets.reshape(-1), (0, pad))

    def score_chunk(part):
        hidden, wanted = part
        logits = model.logits(hidden).astype(jnp.float32)
        target = jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        return target - jax.nn.logsumexp(logits, axis=-1), target >= logits.max(axis=-1)

    parts = (hidden.reshape(-1, chunk, hidden.shape[-1]), wanted.reshape(-1, chunk))
    log_probs, greedy = jax.lax.map(score_chunk, parts)
    used = None
    if output.masks is not None:
        used = usage(output.masks, batch.real, batch.positions + 1, model.config)
    shape = inputs.shape
    return (
        log_probs.reshape(-1)[: inputs.size].reshape(shape),
        greedy.reshape(-1)[: inputs.size].reshape(shape),
        used,
    )


def full_precision(model: WideForCausalLM) -> contextlib.AbstractContextManager:
    """For a float32 model: matmuls in float32, not in the TF32 a GPU would take by default."""
    if element_bytes(model) == 4:
        return jax.default_matmul_precision("float32")
    return contextlib.nullcontext()


def _pad(
    windows: Sequence[Window], rows: int, width: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    inputs, targets = np.zeros((2, rows, width), np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, window in enumerate(windows):
        lengths[row] = len(window.inputs)
        inputs[row, : lengths[row]] = window.inputs
        targets[row, : lengths[row]] = window.targets
    return inputs, targets, lengths


def _check(model: WideForCausalLM, windows: Sequence[Window], batch_size: int, limit: int) -> None:
    longest = model.config.max_position_embeddings
    if limit > longest:
        raise ValueError(
            f"a window of {limit} tokens is longer than the model's "
            f"max_position_embeddings={longest}"
        )
    if batch_size < 1:
        raise ValueError(f"{batch_size=} must be at least 1")
    vocabulary = model.config.vocab_size
    for number, window in enumerate(windows):
        if not 1 <= len(window.inputs) <= limit:
            raise ValueError(
                f"window {number} has {len(window.inputs)} tokens, expected 1 to {limit}"
            )
        for ids in (window.inputs, window.targets):
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise ValueError(
                    f"window {number} has ids from {ids.min()} to {ids.max()}, outside the "
                    f"model's {vocabulary=}: is this the model's own tokenizer?"
                )
