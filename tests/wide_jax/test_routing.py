"""Router decisions: noise, straight-through gradients, ties, and bad values (case C7)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wide_jax.routing import (
    GumbelSoftmax,
    execute_margin,
    logistic_noise,
    sample_mask,
    straight_through,
)


def test_case_C7_noise_of_ten_million_draws_is_finite():
    noise = logistic_noise(jax.random.uniform(jax.random.key(0), (10_000_000,), jnp.float32))
    assert noise.dtype == jnp.float32
    assert bool(jnp.isfinite(noise).all())


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-24, 1.0])
def test_case_C7_extreme_draws_give_finite_noise_and_exact_masks(u):
    noise = logistic_noise(jnp.float32(u))
    assert bool(jnp.isfinite(noise))
    for margin in (-1e4, -20.0, 0.0, 20.0, 1e4, -np.inf):
        mask, gradient = jax.value_and_grad(straight_through)(jnp.float32(margin), noise, 0.5)
        assert float(mask) in (0.0, 1.0)
        assert bool(jnp.isfinite(gradient))


def test_case_C7_gradient_at_the_tie_is_the_soft_one():
    # sigmoid'(0) / tau = 0.25 / 0.5
    gradient = jax.grad(straight_through)(jnp.float32(0.0), jnp.float32(0.0), 0.5)
    assert float(gradient) == pytest.approx(0.5)


def test_noise_is_the_difference_of_two_gumbels():
    # A logistic variable has variance pi^2 / 3, twice a Gumbel's pi^2 / 6, and P(noise < 1) =
    # sigmoid(1).
    noise = np.asarray(logistic_noise(jax.random.uniform(jax.random.key(1), (400_000,))))
    assert noise.mean() == pytest.approx(0.0, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 3, rel=0.01)
    assert (noise < 1).mean() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.003)


def test_masks_are_exactly_zero_or_one_and_keep_rate_follows_the_logits():
    logits = jnp.broadcast_to(jnp.array([1.0, 0.0]), (4, 500, 100, 2))
    routing = GumbelSoftmax(jax.random.key(2), jnp.float32(0.7))
    mask = np.asarray(sample_mask(logits, routing, layer=0, module="ffn"))
    assert set(np.unique(mask)) == {0.0, 1.0}
    assert mask.mean() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.005)


def test_every_layer_and_module_draws_its_own_noise():
    logits = jnp.zeros((1, 8, 64, 2))
    routing = GumbelSoftmax(jax.random.key(3), jnp.float32(1.0))
    seen = [
        np.asarray(sample_mask(logits, routing, layer, module)).tobytes()
        for layer in range(3)
        for module in ("attention", "ffn")
    ]
    assert len(set(seen)) == len(seen)
    again = np.asarray(sample_mask(logits, routing, 0, "attention")).tobytes()
    assert again == seen[0]


def test_noise_is_float32_whatever_the_activations():
    logits = jnp.zeros((1, 4, 8, 2), jnp.float32)
    routing = GumbelSoftmax(jax.random.key(4), jnp.float32(1.0))
    jaxpr = str(jax.make_jaxpr(lambda x: sample_mask(x, routing, 0, "ffn"))(logits))
    assert "bf16" not in jaxpr
    assert "f16" not in jaxpr


def test_class_zero_executes_and_ties_execute():
    logits = jnp.array([[2.0, 1.0], [1.0, 2.0], [1.0, 1.0]])
    assert (execute_margin(logits) >= 0).tolist() == [True, False, True]
