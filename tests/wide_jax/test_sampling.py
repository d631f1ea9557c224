"""Drawing tokens: greedy, temperature, filters, bad logits (case B4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wide_jax.sampling import Sampler, sample


def keys(*seeds: int):
    return jax.vmap(jax.random.key)(jnp.array(seeds))


def support(sampler: Sampler, logits: list[float], temperature: float = 1.0) -> set[int]:
    """Token ids that 400 draws give."""
    rows = 400
    token, _, _ = sample(
        jnp.broadcast_to(jnp.array(logits, jnp.float32), (rows, len(logits))),
        keys(*range(rows)),
        jnp.full((rows,), temperature),
        sampler,
    )
    return set(np.asarray(token).tolist())


def test_case_B4_temperature_zero_is_greedy_beside_a_sampled_row():
    logits = jnp.array([[1.0, 2.0, 3.0, 0.0]] * 2)
    both, _, _ = sample(logits, keys(5, 6), jnp.array([0.0, 1.0]), Sampler())
    alone, _, _ = sample(logits[1:], keys(6), jnp.array([1.0]), Sampler(temperature=1.0))
    assert int(both[0]) == 2
    assert int(both[1]) == int(alone[0])
    greedy, _, _ = sample(logits, keys(5, 6), jnp.zeros(2), Sampler())
    assert greedy.tolist() == [2, 2]


@pytest.mark.parametrize(
    "row", [[0.0, np.nan, 5.0], [np.nan] * 3, [0.0, np.inf, 1.0], [0.0, -np.inf, 1.0]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_B4_non_finite_rows_are_flagged_and_leave_the_others_alone(row, temperature):
    logits = jnp.array([row, [0.0, 1.0, 5.0]], jnp.float32)
    token, log_prob, finite = sample(
        logits, keys(0, 1), jnp.full((2,), temperature), Sampler(temperature=temperature)
    )
    assert finite.tolist() == [False, True]
    good = sample(logits[1:], keys(1), jnp.full((1,), temperature), Sampler())
    assert int(token[1]) == int(good[0][0])
    assert float(log_prob[1]) == pytest.approx(float(good[1][0]))


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_case_B4_bad_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        Sampler(temperature=temperature)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}],
)
def test_settings_out_of_range_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampler(**settings)


def test_frequencies_follow_the_softmax_at_the_temperature():
    rows = 20_000
    logits = jnp.broadcast_to(jnp.array([0.0, 1.0, 2.0]), (rows, 3))
    token, _, _ = sample(logits, keys(*range(rows)), jnp.full((rows,), 2.0), Sampler())
    expected = np.exp(np.array([0.0, 0.5, 1.0]))
    found = np.bincount(np.asarray(token), minlength=3) / rows
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.012)


def test_top_k_keeps_the_k_best_and_their_ties():
    assert support(Sampler(top_k=2), [1.0, 1.2, 0.9, 1.1]) == {1, 3}
    assert support(Sampler(top_k=1), [1.0, 1.0, 0.5]) == {0, 1}
    assert support(Sampler(top_k=50), [1.0, 1.0, 0.5]) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert support(Sampler(top_p=0.4), logits) == {0}
    assert support(Sampler(top_p=0.6), logits) == {0, 1}
    assert support(Sampler(top_p=0.9), logits) == {0, 1, 2}
    assert support(Sampler(top_p=1.0), logits) == {0, 1, 2, 3}


def test_min_p_keeps_tokens_relative_to_the_best():
    logits = np.log([0.6, 0.3, 0.1]).tolist()
    assert support(Sampler(min_p=0.4), logits) == {0, 1}
    assert support(Sampler(min_p=0.0), logits) == {0, 1, 2}
    assert support(Sampler(min_p=1.0), logits) == {0}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = jnp.array([[2.0, 1.5, -1.0], [-1.0, -1.5, -3.0]])
    seen = jnp.array([[True, False, False], [True, False, False]])
    token, _, _ = sample(logits, keys(0, 1), jnp.zeros(2), Sampler(repetition_penalty=2.0), seen)
    assert token.tolist() == [1, 1]  # 2/2 < 1.5 and -1*2 < -1.5


def test_log_probs_are_of_the_unfiltered_distribution():
    logits = jnp.array([[0.0, 1.0, 2.0]])
    _, log_prob, _ = sample(logits, keys(0), jnp.zeros(1), Sampler(top_k=1))
    assert float(log_prob[0]) == pytest.approx(2 - np.log(1 + np.e + np.e**2), abs=1e-6)
