"""Choosing the next token from logits: greedy, temperature, and the usual filters."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How a token is drawn. Filters apply in Hugging Face's order, each to what the last left.

    Args:
        temperature: logits are divided by it; 0 takes the most likely token (the first of equals).
        top_k: keep the k most likely tokens (and any that tie with the k-th).
        top_p: keep the smallest set of most likely tokens whose probability reaches p
            (arXiv 1904.09751).
        min_p: keep tokens of at least min_p times the largest probability (arXiv 2407.01082).
        repetition_penalty: divide positive and multiply negative logits of tokens already seen in
            the row, prompt included (arXiv 1909.05858).

    Raises:
        ValueError: a setting outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1 (None keeps every token)")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1]")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive")


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that is negative, infinite or NaN."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be finite and at least 0 (0 is greedy)")


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, "B"],
    temperature: Float[Array, "B"],
    sampler: Sampler,
    seen: Bool[Array, "B V"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"], Bool[Array, "B"]]:
    """Draw one token a row.

    Every row has its own key and temperature and is drawn as if it were alone. `temperature`
    stands in for `sampler.temperature`, so that rows may differ; 0 is greedy. `seen` marks the
    tokens that a repetition penalty applies to.

    Returns:
        The token ids; their log-probabilities under the unfiltered logits at temperature 1; and
        whether the row's logits were all finite. A row with a NaN or an infinity gets an
        arbitrary token: the caller must not use it.
    """
    raw = logits.astype(jnp.float32)
    finite = jnp.isfinite(raw).all(axis=-1)
    raw = jnp.where(finite[:, None], raw, 0.0)
    penalised = raw
    if seen is not None:
        penalty = sampler.repetition_penalty
        penalised = jnp.where(seen, jnp.where(raw > 0, raw / penalty, raw * penalty), raw)
    greedy = temperature == 0
    filtered = _filter(penalised / jnp.where(greedy, 1.0, temperature)[:, None], sampler)
    drawn = jax.vmap(jax.random.categorical)(keys, filtered)
    token = jnp.where(greedy, jnp.argmax(penalised, axis=-1), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(raw, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(raw, axis=-1), finite


def _filter(logits: Float[Array, "B V"], sampler: Sampler) -> Float[Array, "B V"]:
    """Set the logits of tokens outside top-k, top-p and min-p to -inf."""
    if sampler.top_k is not None:
        k = min(sampler.top_k, logits.shape[-1])
        smallest = jax.lax.top_k(logits, k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampler.top_p is not None:
        order = jnp.argsort(logits, axis=-1, descending=True)
        descending = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(descending, axis=-1) - descending
        kept = before < sampler.top_p  # the token that reaches p is kept, so never an empty set
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = jnp.where(jnp.zeros_like(kept).at[rows, order].set(kept), logits, -jnp.inf)
    if sampler.min_p is not None:
        best = logits.max(axis=-1, keepdims=True)
        # p >= min_p * p_max, in logits; log(0) = -inf keeps everything
        logits = jnp.where(logits < best + jnp.log(sampler.min_p), -jnp.inf, logits)
    return logits
