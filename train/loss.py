"""Next-token cross entropy as sums and counts, in chunks: the [tokens, vocab] logits never exist.

Sums and counts (not means) make micro-batches, devices and rows of any length add up exactly.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from wide_jax.batch import TokenBatch
from wide_jax.partition import constrain

Logits = Callable[[Float[Array, "B t D"]], Float[Array, "B t V"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Negative log-likelihood in nats, summed over scored targets, and how many there are."""

    total: Float[Array, ""]
    count: Int[Array, ""]

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> Float[Array, ""]:
        """Nats per scored target; 0 where nothing is scored."""
        return self.total / jnp.maximum(self.count, 1)


def scored_targets(batch: TokenBatch) -> Bool[Array, "B T"]:
    """True at a token whose *next* token is scored: both real, both of one segment.

    A row's last position has no next token. Padding is told by segment, never by a pad id.
    """
    here, following = batch.segment_ids[:, :-1], batch.segment_ids[:, 1:]
    scored = (here > 0) & (here == following)
    return jnp.pad(scored, ((0, 0), (0, 1)))


def next_token_loss(
    hidden: Float[Array, "B T D"], logits: Logits, batch: TokenBatch, *, chunk: int
) -> LossSums:
    """Cross entropy of each scored next token, in float32.

    Args:
        hidden: normed hidden states of `batch`.
        logits: the output head. Its weights get no gradient here: both stages freeze the head.
        batch: the tokens.
        chunk: positions of each row whose logits exist at once (`B * chunk * V` floats). The
            gradient of a chunk is taken while its logits exist, so nothing is computed twice.
    """
    scored = scored_targets(batch)
    following = jnp.pad(batch.input_ids[:, 1:], ((0, 0), (0, 1)))

    def chunk_loss(hidden, following, scored):
        scores = constrain(logits(hidden).astype(jnp.float32), "logits_BTV")
        # A comparison, not a gather: its gradient is a select, where a gather's is a scatter into
        # another array of all logits.
        vocabulary = jnp.arange(scores.shape[-1], dtype=following.dtype)
        right = jnp.where(vocabulary == following[..., None], scores, 0.0).sum(axis=-1)
        nll = jax.nn.logsumexp(scores, axis=-1) - right
        return jnp.sum(jnp.where(scored, nll, 0.0))

    total = chunked_sum(chunk_loss, hidden, (following, scored), chunk=chunk)
    return LossSums(total, scored.sum(dtype=jnp.int32))


def distillation_loss(
    hidden: Float[Array, "B T D"],
    logits: Logits,
    teacher_hidden: Float[Array, "B T D"],
    teacher_logits: Logits,
    batch: TokenBatch,
    *,
    chunk: int,
) -> LossSums:
    """KL(teacher || student) of the next-token distributions, in nats, at scored positions.

    `sum_v p (log p - log q)` with the teacher's `p` and the student's `q` (arXiv 1503.02531 at
    temperature 1). The teacher is a constant. Arguments as in `next_token_loss`.
    """
    scored = scored_targets(batch)

    def chunk_loss(hidden, teacher_hidden, scored):
        student = jax.nn.log_softmax(
            constrain(logits(hidden).astype(jnp.float32), "logits_BTV"), axis=-1
        )
        teacher = jax.nn.log_softmax(
            constrain(teacher_logits(teacher_hidden).astype(jnp.float32), "logits_BTV"), axis=-1
        )
        kl = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)
        return jnp.sum(jnp.where(scored, kl, 0.0))

    others = (jax.lax.stop_gradient(teacher_hidden), scored)
    return LossSums(
        chunked_sum(chunk_loss, hidden, others, chunk=chunk), scored.sum(dtype=jnp.int32)
    )


def chunked_sum(
    function: Callable[..., Float[Array, ""]],
    hidden: Float[Array, "B T D"],
    others: tuple[Array, ...],
    *,
    chunk: int,
) -> Float[Array, ""]:
    """`function(hidden, *others)`, a sum over positions, worked out `chunk` positions at a time.

    Differentiable with respect to `hidden` alone. The backward pass needs only the gradient by
    `hidden` (`[B, T, D]`), which is taken chunk by chunk in the forward pass; whatever else
    `function` reads (the head's weights) is a constant.
    """
    length = hidden.shape[1]
    if length <= chunk:
        pieces, size = 1, length
    else:
        pieces, size = -(-length // chunk), chunk
    missing = pieces * size - length

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], pieces, size, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(hidden.shape[0], -1, *x.shape[3:])[:, :length]

    @jax.custom_vjp
    def summed(hidden):
        if pieces == 1:
            return function(hidden, *others)
        return jax.lax.map(lambda xs: function(*xs), tuple(map(split, (hidden, *others)))).sum()

    def forward(hidden):
        with_gradient = jax.value_and_grad(function)
        if pieces == 1:
            return with_gradient(hidden, *others)
        sums, gradients = jax.lax.map(
            lambda xs: with_gradient(*xs), tuple(map(split, (hidden, *others)))
        )
        return sums.sum(), join(gradients)

    def backward(gradient, cotangent):
        return ((cotangent * gradient).astype(gradient.dtype),)

    summed.defvjp(forward, backward)
    return summed(hidden)
