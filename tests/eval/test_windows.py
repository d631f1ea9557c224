"""Which tokens are scored (case D1): every one once, none twice."""

import numpy as np
import pytest

from eval.windows import disjoint_windows, rolling_windows

P = 49  # the prefix token


def scored_of(windows):
    """(inputs, scored targets) of each window."""
    return [(w.inputs.tolist(), w.targets[w.scored].tolist()) for w in windows]


def test_case_D1_rolling_windows_of_four():
    assert scored_of(rolling_windows(range(10), 4, P)) == [
        ([P, 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]


def test_case_D1_rolling_windows_of_five():
    assert scored_of(rolling_windows(range(10), 5, P)) == [
        ([P, 0, 1, 2, 3], [0, 1, 2, 3, 4]),
        ([4, 5, 6, 7, 8], [5, 6, 7, 8, 9]),
    ]


@pytest.mark.parametrize("window", [10, 16])
def test_case_D1_one_window_holds_the_document(window):
    assert scored_of(rolling_windows(range(10), window, P)) == [
        ([P, *range(9)], list(range(10))),
    ]


def test_case_D1_an_empty_document_has_no_window():
    assert rolling_windows([], 4, P) == []


@pytest.mark.parametrize("context", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 11, 30])
def test_rolling_scores_every_token_once_after_enough_context(length, context):
    ids = np.arange(length)
    windows = rolling_windows(ids, 5, P, context)
    scored = np.concatenate([w.targets[w.scored] for w in windows])
    assert scored.tolist() == ids.tolist()
    assert sum((w.inputs == P).sum() for w in windows) == 1
    for w in windows:
        assert len(w.inputs) <= 5
        assert (w.targets[:-1] == w.inputs[1:]).all()
    for w in windows[1:]:
        assert len(w.inputs) == 5
        assert np.flatnonzero(w.scored)[0] >= context - 1


def test_rolling_windows_agree_with_the_harness():
    utils = pytest.importorskip("lm_eval.utils", reason="the harness is an extra: pip .[eval]")
    for length in (0, 1, 7, 8, 9, 16, 50):
        for window, context in ((4, 1), (8, 1), (8, 3), (16, 16)):
            theirs = [
                utils.make_disjoint_window(pair)
                for pair in utils.get_rolling_token_windows(
                    list(range(length)), prefix_token=P, max_seq_len=window, context_len=context
                )
            ]
            ours = rolling_windows(range(length), window, P, context)
            assert scored_of(ours) == [
                ((before + scored)[-len(w.inputs) - 1 : -1], scored)
                for w, (before, scored) in zip(ours, theirs, strict=True)
            ]


def test_disjoint_windows_share_nothing_and_skip_each_first_token():
    assert scored_of(disjoint_windows(range(11), 4)) == [
        ([0, 1, 2, 3], [1, 2, 3]),
        ([4, 5, 6, 7], [5, 6, 7]),
    ]


def test_disjoint_windows_of_wikitext_score_302956_tokens():
    windows = disjoint_windows(np.zeros(303_415), 2048)
    assert len(windows) == 148
    assert sum(w.scored_targets for w in windows) == 302_956


def test_a_text_shorter_than_a_window_is_one_short_window():
    assert scored_of(disjoint_windows([7, 8, 9], 4)) == [([7, 8, 9], [8, 9])]
    assert disjoint_windows([7], 4) == []
    assert disjoint_windows([], 4) == []


def test_context_must_fit_the_window():
    with pytest.raises(ValueError, match="context=5 must lie between 1 and window=4"):
        rolling_windows(range(10), 4, P, context=5)
