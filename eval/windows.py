"""Window rules: which tokens the model sees together, and which of their successors are scored."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

WindowRule = Literal["disjoint", "rolling"]


@dataclasses.dataclass(frozen=True)
class Window:
    """One row to run: `inputs[i]` predicts `targets[i]`, which counts where `scored[i]`."""

    inputs: np.ndarray  # int32 [n]
    targets: np.ndarray  # int32 [n]; arbitrary where not scored
    scored: np.ndarray  # bool [n]

    @property
    def scored_targets(self) -> int:
        """How many targets count."""
        return int(self.scored.sum())


def disjoint_windows(ids: Sequence[int] | np.ndarray, window: int) -> list[Window]:
    """Consecutive windows of `window` ids that share nothing; a window's first id is not scored.

    The last, incomplete window is dropped, so n ids give n // window windows of window - 1
    scored tokens (303,415 ids in windows of 2,048: 148 x 2,047 = 302,956). A text shorter than a
    window is one short window.
    """
    ids = np.asarray(ids, np.int32)
    if 1 < len(ids) < window:
        window = len(ids)
    rows = ids[: len(ids) // window * window].reshape(-1, window)
    scored = np.arange(window) < window - 1
    return [Window(row, np.append(row[1:], 0).astype(np.int32), scored) for row in rows]


def rolling_windows(
    ids: Sequence[int] | np.ndarray, window: int, prefix_token: int, context: int = 1
) -> list[Window]:
    """The rule of lm-evaluation-harness: every id of a document is scored exactly once.

    The first window starts with the prefix token; each later one scores the next
    `window - context + 1` ids after `context` or more known ones; the last one reaches back so
    that it is full, and scores only what is left. A document shorter than a window is one short
    window, an empty one none.

    Args:
        ids: one document.
        window: most ids the model sees at once.
        prefix_token: stands before the first id, so that it too is scored.
        context: known ids at least before a scored one, 1 <= context <= window.
    """
    if not 1 <= context <= window:
        raise ValueError(f"{context=} must lie between 1 and {window=}")
    ids = np.asarray(ids, np.int32)
    line = np.concatenate([np.array([prefix_token], np.int32), ids])  # line[i] predicts ids[i]
    windows, done = [], 0
    while done < len(ids):
        step = window if done == 0 else window - context + 1
        end = min(done + step, len(ids))
        start = 0 if done == 0 else max(end - window, 0)
        scored = np.arange(start, end) >= done
        windows.append(Window(line[start:end], ids[start:end], scored))
        done = end
    return windows
