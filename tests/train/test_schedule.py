"""Learning rate and temperature by optimizer update (case C3)."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.tiny import tiny_config, tiny_model, tiny_tokens
from train.hyperparameters import hyperparameters
from train.loop import calibrate
from train.schedule import learning_rate, rate_of, temperature


@pytest.mark.parametrize(
    ("update", "rate"),
    [(0, 0.0), (5, 5e-4), (10, 1e-3), (55, 5e-4), (99, 3.05e-7), (100, 0.0)],
)
def test_case_C3_warm_up_then_cosine_to_zero(update, rate):
    value = learning_rate(update, peak=1e-3, warmup_updates=10, updates=100)
    assert float(value) == pytest.approx(rate, rel=2e-3, abs=1e-12)


def test_schedule_equals_its_formula_in_float64():
    for update in range(0, 100, 7):
        expected = update / 10 if update < 10 else 0.5 * (1 + np.cos(np.pi * (update - 10) / 90))
        value = learning_rate(jnp.int32(update), peak=1.0, warmup_updates=10, updates=100)
        assert float(value) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("warmup", "updates"), [(0, 10), (10, 10), (0, 1), (1, 1)])
def test_edges_of_the_schedule_are_finite(warmup, updates):
    rates = [
        float(learning_rate(n, peak=1.0, warmup_updates=warmup, updates=updates))
        for n in range(updates + 1)
    ]
    assert np.isfinite(rates).all()
    assert rates[0] == (1.0 if warmup == 0 else 0.0)


def test_case_C3_accumulation_does_not_speed_the_schedule_up():
    # 4 micro-batches an update: the logged rate is that of the update, and it is the one used.
    config = tiny_config(updates=6, accumulation=4, warmup_fraction=0.5)
    history = calibrate(tiny_model(), tiny_tokens(), config).history
    assert [r.update for r in history] == list(range(6))
    assert [r.learning_rate for r in history] == pytest.approx(
        [float(rate_of(hyperparameters(config), n)) for n in range(6)]
    )
    assert history[3].learning_rate == pytest.approx(config.learning_rate)


def test_update_0_changes_no_weight():
    model = tiny_model()
    before = np.asarray(model.model.layers[0].router_ffn.router.weight[...])
    result = calibrate(model, tiny_tokens(), tiny_config(updates=1, warmup_fraction=1.0))
    assert result.history[0].gradient_norm > 0
    after = np.asarray(model.model.layers[0].router_ffn.router.weight[...])
    assert np.array_equal(before, after)


def test_temperature_is_linear_from_first_to_last_update():
    values = [float(temperature(n, start=5.0, end=0.5, updates=10)) for n in range(10)]
    assert values == pytest.approx(np.linspace(5.0, 0.5, 10), rel=1e-6)
    assert float(temperature(0, start=5.0, end=0.5, updates=1)) == 5.0
