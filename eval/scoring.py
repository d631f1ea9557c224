"""Log-probabilities of given tokens, with what the masks skipped while computing them.

The one loop under perplexity and the harness: rows are padded on the right to a few lengths (one
compile each), batches are filled up with empty rows, and no row's result depends on its batch.

Shapes are few on purpose. Seven tasks of 500 documents are half a million tokens, seconds of an
H200 for a small model. Lengths by halves, and as many choices as a row has, made 38 shapes of them,
ten seconds of compiling each; now there are 12.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eval.windows import Window
from pallas_kernels._common.forms import next_power_of_two
from wide_jax.accounting import Accounting, Usage, account, usage
from wide_jax.batch import TokenBatch
from wide_jax.model import WideForCausalLM
from wide_jax.routing import AllOn, Argmax, Routing
from wide_jax.structure import split

SHORTEST_BUCKET = 32
FEWEST_CHOICES = 4  # of rows that share inputs: more targets of a row cost next to nothing
COMPILED_AT_ONCE = 8
type Scorer = Callable[
    [Int[np.ndarray, "B T"], Int[np.ndarray, "B C T"], Int[np.ndarray, "B"]],
    tuple[Float[Array, "B C T"], Bool[Array, "B C T"], Usage | None],
]
LOGITS_CHUNK = 512  # tokens whose logits exist at once: 512 x 128,256 x float32 = 263 MB


@dataclasses.dataclass(frozen=True)
class Score:
    """One window's result on the host."""

    log_probs: np.ndarray  # float32 [scored targets], nats
    greedy: np.ndarray  # bool [scored targets]: the target had the highest logit


@dataclasses.dataclass(frozen=True)
class Ran:
    """How many real tokens ran, what they saw, and what their masks skipped."""

    tokens: int = 0
    keys: int = 0  # sum of visible keys, itself included, before any sliding window
    usage: Usage | None = None  # float64; None: nothing was routed

    def __add__(self, other: "Ran") -> "Ran":
        parts = [part for part in (self.usage, other.usage) if part is not None]
        total = parts[0] + parts[1] if len(parts) == 2 else (parts[0] if parts else None)
        return Ran(self.tokens + other.tokens, self.keys + other.keys, total)

    @classmethod
    def of(cls, first: np.ndarray, last: np.ndarray, usage: Usage | None) -> "Ran":
        """Rows whose tokens see `first` keys, one more each, up to `last`."""
        first, last = np.asarray(first, np.int64), np.asarray(last, np.int64)
        counts = last - first + 1
        keys = int((counts * (first + last) // 2).sum())
        return cls(int(counts.sum()), keys, None if usage is None else usage.to_host())

    def accounting(self, model: WideForCausalLM) -> Accounting:
        """The figures of a report; a run without masks skipped nothing."""
        if self.usage is None or model.wide is None:
            return Accounting.dense(model.config, self.tokens, self.keys / max(self.tokens, 1))
        size = element_bytes(model)
        return account(self.usage, model.config, model.wide, weight_bytes=size, kv_bytes=size)


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """The windows of one device batch: their numbers in the caller's list, and their results."""

    indices: tuple[int, ...]
    scores: tuple[Score, ...]
    ran: Ran


def default_routing(model: WideForCausalLM) -> Routing:
    """Argmax with routers, everything on without."""
    return AllOn() if model.wide is None else Argmax()


def element_bytes(model: WideForCausalLM) -> int:
    """Size of a stored weight (and of a cached key or value) of this model, in bytes."""
    return model.dtype.itemsize


def bucket(length: int, limit: int) -> int:
    """The padded length of a row: 32, 64, 128 ... but no more than `limit`."""
    return min(max(SHORTEST_BUCKET, next_power_of_two(length)), max(limit, length))


def score_windows(
    model: WideForCausalLM,
    windows: Sequence[Window],
    *,
    routing: Routing,
    batch_size: int,
    limit: int,
    share: bool = False,
) -> Iterator[ScoredBatch]:
    """Score every window once, longest first (so that the largest memory need comes first).

    Args:
        model: the model; float32 ones run at full float32 precision on every device.
        windows: any lengths from 1 to `limit`.
        routing: how groups are chosen.
        batch_size: rows of a device batch.
        limit: the longest row, and the largest padded length.
        share: run windows of equal inputs once, with all their targets (multiple choice).

    Raises:
        ValueError: a window that is empty, longer than `limit` or has ids outside the vocabulary,
            a batch size below 1, a limit beyond the model's `max_position_embeddings`.
    """
    _check(model, windows, batch_size, limit)
    run = scorer(model, routing)
    batches = list(_batches(windows, batch_size, limit, share))
    shapes = list(dict.fromkeys(batch[:3] for batch in batches))
    if jax.default_backend() != "cpu" and len(shapes) > 1:
        compile_together(run, shapes)
    for width, choices, row_count, rows in batches:
        inputs, targets, lengths = _pad(windows, rows, row_count, width, choices)
        log_probs, greedy, used = jax.device_get(run(inputs, targets, lengths))
        indices, scores = [], []
        for row, members in enumerate(rows):
            for choice, index in enumerate(members):
                scored = np.flatnonzero(windows[index].scored)
                indices.append(index)
                scores.append(Score(log_probs[row, choice, scored], greedy[row, choice, scored]))
        real = lengths[: len(rows)]
        ran = Ran.of(np.ones_like(real), real, used)
        yield ScoredBatch(tuple(indices), tuple(scores), ran)


def scorer(model: WideForCausalLM, routing: Routing) -> Scorer:
    """`score_rows` of a model, for inputs, targets and lengths; any thread may call it."""
    graphdef, state = split(model)

    def run(inputs, targets, lengths):
        with full_precision(model):  # of the thread that calls
            return score_rows(graphdef, state, inputs, targets, lengths, routing)

    return run


def compile_together(run: Scorer, shapes: Sequence[tuple[int, int, int]]) -> None:
    """Have a scorer compiled for all (width, choices, rows) side by side.

    One after another, as batches come, a task's shapes take minutes on a GPU. Each runs once, on
    nothing; where computing takes longer than compiling (a CPU) that is not worth it.
    """

    def once(shape: tuple[int, int, int]) -> None:
        width, choices, count = shape
        run(*_pad((), (), count, width, choices))

    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        list(pool.map(once, shapes))


@functools.partial(jax.jit, static_argnames="graphdef")
def score_rows(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B C T"],
    lengths: Int[Array, "B"],
    routing: Routing,
) -> tuple[Float[Array, "B C T"], Bool[Array, "B C T"], Usage | None]:
    """Log-probability of each of C targets after its input, and whether its logit was highest.

    Logits are in the model's dtype, the log-softmax in float32; only `LOGITS_CHUNK` tokens of
    logits exist at a time. Columns past a row's length hold arbitrary values.
    """
    model = nnx.merge(graphdef, state)
    batch = TokenBatch.from_lengths(inputs, lengths)
    output = model(batch, routing)
    chunk = min(LOGITS_CHUNK, inputs.size)
    pad = ((0, -inputs.size % chunk), (0, 0))
    hidden = jnp.pad(output.hidden.reshape(inputs.size, -1), pad)
    wanted = jnp.pad(targets.swapaxes(1, 2).reshape(inputs.size, -1), pad)

    def score_chunk(part):
        hidden, wanted = part
        logits = model.logits(hidden).astype(jnp.float32)
        target = jnp.take_along_axis(logits, wanted, axis=-1)
        norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return target - norm, target >= logits.max(axis=-1, keepdims=True)

    parts = jax.tree.map(lambda x: x.reshape(-1, chunk, x.shape[-1]), (hidden, wanted))
    found = jax.lax.map(score_chunk, parts)
    log_probs, greedy = (
        x.reshape(-1, wanted.shape[-1])[: inputs.size].reshape(*inputs.shape, -1).swapaxes(1, 2)
        for x in found
    )
    used = None
    if output.masks is not None:
        used = usage(output.masks, batch.real, batch.positions + 1, model.config)
    return log_probs, greedy, used


def full_precision(model: WideForCausalLM) -> contextlib.AbstractContextManager:
    """For a float32 model: matmuls in float32, not in the TF32 a GPU would take by default."""
    if element_bytes(model) == 4:
        return jax.default_matmul_precision("float32")
    return contextlib.nullcontext()


def _batches(
    windows: Sequence[Window], batch_size: int, limit: int, share: bool
) -> Iterator[tuple[int, int, int, list[list[int]]]]:
    """(padded length, padded choices, rows, the windows of each row) of every batch."""
    rows: dict[object, list[int]] = {}
    for index, window in enumerate(windows):
        rows.setdefault(window.inputs.tobytes() if share else index, []).append(index)
    choices = 1
    if share:
        choices = max([FEWEST_CHOICES, *(next_power_of_two(len(row)) for row in rows.values())])
    widths: dict[int, list[list[int]]] = {}
    for members in rows.values():
        width = bucket(len(windows[members[0]].inputs), limit)
        widths.setdefault(width, []).append(members)
    for width, members in sorted(widths.items(), reverse=True):
        for start in range(0, len(members), batch_size):
            count = min(batch_size, next_power_of_two(len(members)))  # few shapes
            yield width, choices, count, members[start : start + batch_size]


def _pad(
    windows: Sequence[Window], rows: Sequence[Sequence[int]], count: int, width: int, choices: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B C T"], Int[np.ndarray, "B"]]:
    inputs = np.zeros((count, width), np.int32)
    targets = np.zeros((count, choices, width), np.int32)
    lengths = np.zeros(count, np.int32)
    for row, members in enumerate(rows):
        lengths[row] = len(windows[members[0]].inputs)
        inputs[row, : lengths[row]] = windows[members[0]].inputs
        for choice, index in enumerate(members):
            targets[row, choice, : lengths[row]] = windows[index].targets
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
