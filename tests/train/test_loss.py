"""Cross entropy as sums and counts (case C1), in chunks, under any padding and packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loss import LossSums, chunked_sum, next_token_loss, scored_targets
from wide_jax.batch import TokenBatch


def batch_of(ids, segments):
    ids, segments = jnp.asarray(ids, jnp.int32), jnp.asarray(segments, jnp.int32)
    return TokenBatch(ids, jnp.zeros_like(ids), segments)


def test_scored_targets_are_real_pairs_of_one_segment():
    segments = [[1, 1, 1, 2, 2, 0, 0], [0, 0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0]]
    scored = scored_targets(batch_of(np.zeros((3, 7)), segments))
    assert scored.astype(int).tolist() == [
        [1, 1, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]


def test_case_C1_sums_and_counts_add_up():
    short = LossSums(jnp.float32(6.0), jnp.int32(3))
    long = LossSums(jnp.float32(9.0), jnp.int32(9))
    assert float((short + long).mean) == pytest.approx(15 / 12)


def test_case_C1_a_batch_with_nothing_scored_is_zero_with_zero_gradient():
    hidden = jnp.ones((2, 5, 4))
    batch = batch_of(np.zeros((2, 5)), np.zeros((2, 5)))

    def mean(hidden):
        return next_token_loss(hidden, lambda h: h @ jnp.ones((4, 7)), batch, chunk=8).mean

    value, gradient = jax.value_and_grad(mean)(hidden)
    assert float(value) == 0.0
    assert not np.asarray(gradient).any()


def test_case_C1_uniform_model_counts_targets_after_the_shift():
    # A row of 4 tokens has 3 targets and one of 10 has 9: with uniform scores each costs log(V).
    ids = np.zeros((2, 10))
    segments = [[1] * 4 + [0] * 6, [1] * 10]
    loss = next_token_loss(
        jnp.ones((2, 10, 3)),
        lambda h: jnp.zeros((*h.shape[:2], 50)),
        batch_of(ids, segments),
        chunk=4,
    )
    assert int(loss.count) == 12
    assert float(loss.total) == pytest.approx(12 * np.log(50), rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 11, 64])
def test_chunks_equal_the_whole_in_value_and_gradient(chunk):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(3, 11, 6)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(6, 13)), jnp.float32)
    ids = rng.integers(0, 13, (3, 11))
    segments = [[1] * 11, [1] * 4 + [2] * 3 + [0] * 4, [0] * 11]
    batch = batch_of(ids, segments)

    def naive(hidden):
        nll = -jax.nn.log_softmax(hidden @ head)[:, :-1]
        picked = jnp.take_along_axis(nll, batch.input_ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(picked * scored_targets(batch)[:, :-1])

    def chunked(hidden):
        return next_token_loss(hidden, lambda h: h @ head, batch, chunk=chunk).total

    value, gradient = jax.value_and_grad(lambda h: 3.0 * chunked(h))(hidden)
    expected, expected_gradient = jax.value_and_grad(lambda h: 3.0 * naive(h))(hidden)
    assert float(chunked(hidden)) == pytest.approx(float(expected) / 3, rel=1e-6)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)


def test_whole_logits_never_exist():
    hidden, head = jnp.ones((2, 64, 4)), jnp.ones((4, 999))
    batch = batch_of(np.zeros((2, 64)), np.ones((2, 64)))

    def loss(hidden):
        return next_token_loss(hidden, lambda h: h @ head, batch, chunk=16).total

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(hidden))
    assert "16,999" in text
    assert "64,999" not in text
    assert "128,999" not in text


def test_bf16_hidden_states_are_scored_in_float32():
    hidden = jnp.ones((1, 4, 8), jnp.bfloat16)
    batch = batch_of(np.zeros((1, 4)), np.ones((1, 4)))
    loss = next_token_loss(hidden, lambda h: h @ jnp.ones((8, 5), jnp.bfloat16), batch, chunk=4)
    assert loss.total.dtype == jnp.float32
    gradient = jax.grad(lambda h: next_token_loss(h, lambda x: x * 2, batch, chunk=4).total)(hidden)
    assert gradient.dtype == jnp.bfloat16


def test_a_gradient_by_the_closed_over_head_is_refused_not_zero():
    hidden = jnp.ones((1, 4, 3))

    def through_head(head):
        return chunked_sum(lambda h: jnp.sum(h @ head), hidden, (), chunk=4)

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.grad(through_head)(jnp.ones((3, 5)))
