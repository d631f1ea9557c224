"""Where the routers cut: biases moved until argmax masks skip the target on training text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.tiny import tiny_config, tiny_model
from train.evaluate import make_evaluation, make_skips
from train.parts import place, take_apart
from train.threshold import SpreadRows, absorb_thresholds, meet_target
from wide_jax import partition
from wide_jax.batch import TokenBatch
from wide_jax.dial import shifted
from wide_jax.params import RouterParam
from wide_jax.routing import Argmax, GumbelSoftmax

ATTENTION = "model.layers.0.router_attention.router.bias"
FFN = "model.layers.0.router_ffn.router.bias"


def routers():
    return {
        ATTENTION: jnp.zeros(4),
        FFN: jnp.arange(6.0),
        "model.layers.0.router_ffn.compressor.bias": jnp.ones(3),
    }


def spread(*, seed=0, centre=1.0, coupling=0.0):
    """What argmax masks would skip were margins normal around `centre`, and how often asked."""
    margins = np.random.default_rng(seed).normal(centre, 1.0, 20_000)
    calls = []

    def skipped(trainable):
        calls.append(trainable)
        attention = float(trainable[ATTENTION][0] - trainable[ATTENTION][1])
        ffn = float(trainable[FFN][0] - trainable[FFN][1]) + 1.0
        rates = {
            "attention": float((margins + attention + coupling * ffn < 0).mean()),
            "ffn": float((margins + ffn < 0).mean()),
        }
        paper = sum(rates.values()) / 2
        return rates | {"paper": paper, "flops": 0.2 * rates["attention"] + 0.8 * rates["ffn"]}

    return skipped, calls


@pytest.mark.parametrize("centre", [1.0, -2.0, 9.0])
def test_each_module_reaches_its_own_target(centre):
    skipped, calls = spread(centre=centre, coupling=0.1)
    config = tiny_config(attention_sparsity=0.4, ffn_sparsity=0.1)
    moved, shift = meet_target(routers(), config, skipped)
    after = skipped(moved)
    assert after["attention"] == pytest.approx(0.4, abs=0.005)
    assert after["ffn"] == pytest.approx(0.1, abs=0.005)
    assert shift.after == after
    assert shift.before == skipped(routers())
    assert len(calls) < 20
    assert "attention" in shift.line()


@pytest.mark.parametrize("budget", ["paper", "flops"])
def test_other_budgets_move_all_modules_alike(budget):
    skipped, _ = spread()
    moved, shift = meet_target(routers(), tiny_config(budget=budget, sparsity=0.5), skipped)
    assert skipped(moved)[budget] == pytest.approx(0.5, abs=0.005)
    assert shift.biases["attention"] == shift.biases["ffn"]


def test_a_module_without_routing_is_left_alone_and_counts_in_no_mean():
    skipped, _ = spread()
    moved, shift = meet_target(routers(), tiny_config(budget="paper", target="ffn"), skipped)
    assert skipped(moved)["ffn"] == pytest.approx(0.25, abs=0.005)
    assert list(shift.biases) == ["ffn"]
    assert np.array_equal(moved[ATTENTION], routers()[ATTENTION])


def test_only_execute_biases_move():
    moved = shifted(routers(), {"ffn": 0.5})
    assert moved[FFN].tolist() == [0.5, 1.0, 2.5, 3.0, 4.5, 5.0]
    for name in (ATTENTION, "model.layers.0.router_ffn.compressor.bias"):
        assert np.array_equal(moved[name], routers()[name])


def test_what_meets_the_target_already_stays_bit_for_bit():
    skipped, _ = spread(centre=1.0)
    rates = skipped(routers())
    goals = {"attention_sparsity": rates["attention"], "ffn_sparsity": rates["ffn"]}
    moved, shift = meet_target(routers(), tiny_config(**goals), skipped)
    assert set(shift.biases.values()) == {0.0}
    assert np.array_equal(moved[FFN], routers()[FFN])


def test_a_dialled_models_thresholds_become_biases_that_sampling_obeys_too():
    """The same argmax masks; sampled ones now skip about as much (their noise is symmetric)."""
    model = tiny_model()
    batch = TokenBatch.from_lengths(jnp.arange(256).reshape(8, 32) % model.config.vocab_size)
    for layer in model.model.layers:
        layer.router_attention.threshold, layer.router_ffn.threshold = 3.0, -40.0
    model.wide = dataclasses.replace(model.wide, attention_threshold=3.0, ffn_threshold=-40.0)
    before = model(batch, Argmax()).masks
    assert absorb_thresholds(model) == {"attention": 3.0, "ffn": -40.0}
    assert (model.wide.attention_threshold, model.wide.ffn_threshold) == (0.0, 0.0)
    after = model(batch, Argmax()).masks
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(old, new)
    sampled = model(batch, GumbelSoftmax(jax.random.key(0), jnp.float32(1.0))).masks
    assert all(mask.all() for mask in sampled.ffn)  # no noise turns a margin of 40
    assert np.mean([mask.mean() for mask in sampled.attention]) < 0.3
    assert absorb_thresholds(model) == {}


def test_what_masks_skip_is_the_evaluations_without_its_loss():
    model, config, mesh = tiny_model(), tiny_config(budget="flops"), partition.make_mesh()
    parts, trainable, frozen = take_apart(model, RouterParam)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (16, 16), np.int32)
    rows = [(row, (np.arange(16) < 16 - n).astype(np.int32)) for n, row in enumerate(ids)]
    with jax.set_mesh(mesh):
        trainable, frozen = place(trainable, mesh), place(frozen, mesh)
        whole = make_evaluation(parts, model.config, model.wide, config, mesh)
        skips = make_skips(parts, model.config, model.wide, config, mesh, rows)
        assert skips(trainable, frozen) == whole(trainable, frozen, rows, 16).skip
        moved = shifted(trainable, {"ffn": 100.0})
        assert skips(moved, frozen)["ffn"] == 0.0


def test_sampled_rows_are_spread_over_all():
    rows = SpreadRows(list(range(100)), 5)
    assert [rows[n] for n in range(len(rows))] == [0, 20, 40, 60, 80]
    few = SpreadRows(list(range(2)), 4)
    assert [few[n] for n in range(len(few))] == [0, 0, 1, 1]
