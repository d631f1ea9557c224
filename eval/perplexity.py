"""Perplexity of a text per token, word and byte, with the accounting of the tokens evaluated."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from eval.scoring import Ran, default_routing, score_windows
from eval.text import TokenizedText
from eval.windows import Window, WindowRule, disjoint_windows, rolling_windows
from wide_jax.accounting import Accounting
from wide_jax.model import WideForCausalLM
from wide_jax.routing import Routing

Progress = Callable[[int, int, float], None]  # windows done, windows in all, perplexity so far


@dataclasses.dataclass(frozen=True)
class PerplexityConfig:
    """How a text is cut into windows (`eval.windows` has the rules) and run.

    Attributes:
        rule: `disjoint` (one run of ids, no BOS; each window's first token is not scored) or
            `rolling` (lm-evaluation-harness: every token of every document is scored).
        window: tokens the model sees at once.
        max_windows: only the first so many windows; None: all.
        batch_size: windows a device batch; results do not depend on it.
        prefix_token: stands before a document under `rolling`: the model's BOS, else EOS.
    """

    rule: WindowRule = "disjoint"
    window: int = 2048
    max_windows: int | None = None
    batch_size: int = 1
    prefix_token: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("window", 2 if self.rule == "disjoint" else 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.max_windows is not None and self.max_windows < 1:
            raise ValueError(f"max_windows={self.max_windows} must be at least 1, or None for all")
        if self.rule == "rolling" and self.prefix_token is None:
            raise ValueError("the rolling rule needs a prefix_token: the model's BOS, else its EOS")

    @property
    def stride(self) -> int:
        """Tokens from one window's start to the next one's."""
        return self.window

    @property
    def joined(self) -> bool:
        """Whether documents are evaluated as one run of ids (`eval.text.tokenize` needs it)."""
        return self.rule == "disjoint"


@dataclasses.dataclass(frozen=True)
class PerplexityResult:
    """Perplexities, each named by its unit, and everything they were made of.

    Word and byte perplexity spread the text's negative log-likelihood over its words and bytes.
    Where not every token was scored (`disjoint`, `max_windows`), that of the text is taken as the
    scored tokens' mean times its number of tokens.
    """

    config: PerplexityConfig
    negative_log_likelihood: float  # nats, over the scored tokens
    scored_tokens: int
    windows: int
    text_tokens: int
    text_words: int
    text_bytes: int
    token_perplexity: float
    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float
    token_perplexity_stderr: float | None  # from the spread of the windows; None below two
    window_losses: tuple[float, ...]  # nats over each window's scored tokens, to compare models by
    accounting: Accounting

    def line(self) -> str:
        """One line for people; the accounting has its own."""
        return (
            f"token perplexity {self.token_perplexity:.2f} over {self.scored_tokens:,} tokens | "
            f"word perplexity {self.word_perplexity:.2f} | "
            f"byte perplexity {self.byte_perplexity:.4f} ({self.bits_per_byte:.4f} bits a byte) | "
            f"{self.windows} {self.config.rule} windows of {self.config.window}, "
            f"stride {self.config.stride}"
        )

    def to_json(self) -> dict[str, object]:
        """Every figure, as plain JSON types."""
        config = dataclasses.asdict(self.config) | {"stride": self.config.stride}
        return dataclasses.asdict(self) | {
            "config": config,
            "accounting": self.accounting.to_json(),
            "window_losses": list(self.window_losses),
        }


def evaluate_perplexity(
    model: WideForCausalLM,
    text: TokenizedText,
    config: PerplexityConfig | None = None,
    *,
    routing: Routing | None = None,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Perplexity of `text`.

    Args:
        model: with routers for any routing but `AllOn`.
        text: ids by `eval.text.tokenize(..., join=config.joined)`.
        config: windows and batch size.
        routing: by default the routers' argmax, or everything on in a model without routers.
        progress: called after every batch.

    Raises:
        ValueError: no token to score, ids outside the vocabulary, or a window the model cannot
            hold.
        FloatingPointError: a log-probability is NaN or infinite; the message names the window.
    """
    config = PerplexityConfig() if config is None else config
    routing = default_routing(model) if routing is None else routing
    windows = cut(text, config)
    if not any(window.scored_targets for window in windows):
        raise ValueError(f"nothing to score: the text has {text.tokens} token(s)")
    total, ran = np.zeros(len(windows)), Ran()
    done = scored = 0
    for batch in score_windows(
        model, windows, routing=routing, batch_size=config.batch_size, limit=config.window
    ):
        for index, score in zip(batch.indices, batch.scores, strict=True):
            total[index] = -score.log_probs.astype(np.float64).sum()
            scored += len(score.log_probs)
            if not math.isfinite(total[index]):
                raise FloatingPointError(
                    f"window {index}: the log-likelihood is not finite; check the weights "
                    "(wide check) and the dtype"
                )
        ran = ran + batch.ran
        done += len(batch.indices)
        if progress is not None:
            progress(done, len(windows), _perplexity(total.sum(), scored))
    return _result(model, text, config, windows, total, ran)


def cut(text: TokenizedText, config: PerplexityConfig) -> list[Window]:
    """The windows of all documents, in order."""
    windows: list[Window] = []
    for ids in text.documents:
        if config.rule == "disjoint":
            windows += disjoint_windows(ids, config.window)
        else:
            assert config.prefix_token is not None  # checked when the config was made
            windows += rolling_windows(ids, config.window, config.prefix_token)
    return windows[: config.max_windows]


def _result(
    model: WideForCausalLM,
    text: TokenizedText,
    config: PerplexityConfig,
    windows: list[Window],
    losses: np.ndarray,
    ran: Ran,
) -> PerplexityResult:
    counts = np.array([window.scored_targets for window in windows])
    scored, loss = int(counts.sum()), float(losses.sum())
    mean = loss / scored
    whole = mean * text.tokens  # equal to `loss` where every token was scored
    perplexity = math.exp(mean)
    stderr = None
    if len(windows) > 1:  # of a ratio of sums, by the delta method
        spread = np.sum((losses - mean * counts) ** 2) * len(windows) / (len(windows) - 1)
        stderr = perplexity * math.sqrt(spread) / scored
    return PerplexityResult(
        config=config,
        negative_log_likelihood=loss,
        scored_tokens=scored,
        windows=len(windows),
        text_tokens=text.tokens,
        text_words=text.words,
        text_bytes=text.bytes,
        token_perplexity=perplexity,
        word_perplexity=_perplexity(whole, text.words),
        byte_perplexity=_perplexity(whole, text.bytes),
        bits_per_byte=whole / text.bytes / math.log(2),
        token_perplexity_stderr=stderr,
        window_losses=tuple(losses.tolist()),
        accounting=ran.accounting(model),
    )


def _perplexity(loss: float, units: int) -> float:
    """exp(loss / units), infinite where that is beyond a float."""
    try:
        return math.exp(loss / units)
    except OverflowError:
        return math.inf
