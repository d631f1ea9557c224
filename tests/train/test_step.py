"""The update: frozen base, exact accumulation, fresh noise, one compilation, same on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.tiny import (
    assert_params_close,
    dot_shapes,
    ragged_batch,
    tiny_config,
    tiny_model,
    tiny_tokens,
)
from train.data import HostBatch, on_mesh
from train.hyperparameters import hyperparameters
from train.loop import calibrate
from train.parts import place, take_apart
from train.run_config import CalibrateConfig
from train.schedule import learning_rate
from train.step import accumulate_gradient, init_optimizer, make_step
from wide_jax import partition, routing
from wide_jax.batch import TokenBatch
from wide_jax.params import BaseParam, RouterParam
from wide_jax.routing import AllOn


def gradient_of(batch, config, *, mesh=None, model=None, update=3, trained=RouterParam):
    """Gradient and metrics of one update, jitted, on a mesh (default: one device)."""
    mesh = mesh or partition.make_mesh(config.data_parallel, config.fsdp, config.tensor_parallel)
    model = model or tiny_model()
    parts, trainable, frozen = take_apart(model, trained)
    host = HostBatch(
        np.asarray(batch.input_ids), np.asarray(batch.positions), np.asarray(batch.segment_ids)
    )
    with jax.set_mesh(mesh):
        run = jax.jit(
            lambda *arrays: accumulate_gradient(
                *arrays, parts=parts, model=model.config, config=config
            )
        )
        return run(
            place(trainable, mesh),
            place(frozen, mesh),
            on_mesh(host, mesh),
            np.int32(update),
            jax.random.key(0),
            hyperparameters(config),
        )


@pytest.fixture
def no_noise(monkeypatch):
    """Masks that depend on the logits alone, so that splits of a batch can be compared."""
    monkeypatch.setattr(routing, "logistic_noise", jnp.zeros_like)


def test_base_is_bit_identical_and_routers_change():
    model = tiny_model()
    before = {k: np.array(v) for k, v in take_apart(model, RouterParam)[2].items()}
    routers = {k: np.array(v) for k, v in take_apart(model, RouterParam)[1].items()}
    result = calibrate(model, tiny_tokens(), tiny_config(updates=4))
    _, after_routers, after = take_apart(model, RouterParam)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.tobytes() == np.asarray(after[name]).tobytes(), name
    assert all((np.asarray(after_routers[name]) != routers[name]).any() for name in routers)
    assert_params_close(after_routers, result.trainable, rtol=0)


def test_no_gradient_or_moment_of_the_base_exists():
    # F = 128 and D = 32: a weight gradient of the FFN would be a dot_general of shape [128, 32]
    # (or its transpose). Routers make [4, 32] and such only.
    model, config = tiny_model(), tiny_config()
    parts, trainable, frozen = take_apart(model, RouterParam)
    batch = ragged_batch()

    def run(trainable):
        return accumulate_gradient(
            trainable, frozen, batch, jnp.int32(3), jax.random.key(0), hyperparameters(config),
            parts=parts, model=model.config, config=config,
        )  # fmt: skip

    base_shapes = {v.shape for v in frozen.values()} | {v.shape[::-1] for v in frozen.values()}
    base_shapes -= {shape for shape in base_shapes if len(shape) == 1}
    made = set(dot_shapes(jax.make_jaxpr(run)(trainable).jaxpr))
    assert made
    assert not made & base_shapes

    mesh = partition.make_mesh()
    opt_state = init_optimizer(config, trainable, mesh)
    moments = [leaf.shape for leaf in jax.tree.leaves(opt_state) if leaf.ndim]
    assert sorted(moments) == sorted([v.shape for v in trainable.values()] * 2)


def test_the_jaxpr_check_sees_a_base_gradient_when_there_is_one():
    weight, x = jnp.ones((128, 32)), jnp.ones((4, 32))
    jaxpr = jax.make_jaxpr(jax.jit(jax.grad(lambda w: jnp.sum(x @ w.T))))(weight)
    assert {(128, 32), (32, 128)} & set(dot_shapes(jaxpr.jaxpr))


def test_clip_norm_is_over_trained_leaves_only_and_the_update_is_adamw():
    config = tiny_config(updates=10, warmup_fraction=0.5, clip_norm=1e-3)
    model = tiny_model()
    mesh = partition.make_mesh()
    parts, trainable, frozen = take_apart(model, RouterParam)
    gradient, metrics = gradient_of(ragged_batch(), config, model=model)
    flat = np.concatenate([np.asarray(g).ravel() for g in gradient.values()])
    assert float(metrics.gradient_norm) == pytest.approx(np.linalg.norm(flat), rel=1e-5)
    assert np.linalg.norm(flat) > config.clip_norm

    rate = float(learning_rate(3, peak=2e-3, warmup_updates=5, updates=10))
    reference = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(rate, weight_decay=0.01))
    change, _ = reference.update(gradient, reference.init(trainable), trainable)
    expected = optax.apply_updates(trainable, change)
    with jax.set_mesh(mesh):
        start = jax.tree.map(jnp.copy, trainable)
        opt_state = init_optimizer(config, start, mesh)
        step = make_step(parts, model.config, config, start, opt_state)
        batch = ragged_batch()
        actual, _, _ = step(
            start, opt_state, frozen, batch, np.int32(3), jax.random.key(0), hyperparameters(config)
        )
    assert_params_close(actual, expected, rtol=1e-5, atol=1e-8)


def test_case_C1_accumulated_cross_entropy_is_the_big_batch_one(no_noise):
    # Without the budget term (which is averaged over micro-batches by definition).
    whole, seen = gradient_of(ragged_batch(), tiny_config(alpha=0.0))
    for accumulation in (2, 8):
        config = tiny_config(alpha=0.0, accumulation=accumulation)
        split, seen_split = gradient_of(ragged_batch(), config)
        assert float(seen.lm_loss) == pytest.approx(float(seen_split.lm_loss), rel=1e-6)
        assert int(seen.scored) == int(seen_split.scored)
        assert float(seen.sampled.tokens) == float(seen_split.sampled.tokens)
        np.testing.assert_allclose(seen.hard.ffn, seen_split.hard.ffn, rtol=1e-6)
        assert_params_close(split, whole, atol=1e-6)


def test_budget_terms_of_micro_batches_are_averaged(no_noise):
    batch, config = ragged_batch(rows=4), tiny_config(sequences_per_update=4, accumulation=2)
    _, seen = gradient_of(batch, config)
    halves = [
        TokenBatch(*(x[a::2] for x in (batch.input_ids, batch.positions, batch.segment_ids)))
        for a in range(2)
    ]
    half = tiny_config(sequences_per_update=2)
    terms = [float(gradient_of(rows, half)[1].budget_term) for rows in halves]
    assert float(seen.budget_term) == pytest.approx(np.mean(terms), rel=1e-6)
    assert terms[0] != pytest.approx(terms[1])


def test_a_micro_batch_without_real_tokens_counts_for_nothing(no_noise):
    batch = ragged_batch(rows=4)
    padded = TokenBatch(
        *(jnp.zeros((8, 16), jnp.int32).at[::2].set(x)
          for x in (batch.input_ids, batch.positions, batch.segment_ids))
    )  # fmt: skip
    alone, seen_alone = gradient_of(batch, tiny_config(sequences_per_update=4))
    both, seen = gradient_of(padded, tiny_config(accumulation=2))
    assert float(seen.budget_term) == pytest.approx(float(seen_alone.budget_term), rel=1e-6)
    assert float(seen.lm_loss) == pytest.approx(float(seen_alone.lm_loss), rel=1e-6)
    assert_params_close(both, alone, atol=1e-6)


def test_an_all_padding_batch_has_zero_loss_and_no_nan():
    zeros = jnp.zeros((8, 16), jnp.int32)
    gradient, seen = gradient_of(TokenBatch(zeros, zeros, zeros), tiny_config())
    assert (float(seen.lm_loss), float(seen.budget_term)) == (0.0, 0.0)
    assert not any(np.asarray(g).any() for g in gradient.values())


@functools.cache
def single_device(tied):
    return gradient_of(ragged_batch(), tiny_config(), model=tiny_model(tied=tied, layers=2))


@pytest.mark.parametrize(
    ("mesh", "tied"),
    [
        ((8, 1, 1), True),
        ((1, 8, 1), True),
        ((1, 1, 4), True),
        ((2, 2, 2), True),
        ((1, 2, 4), False),
    ],
    ids=["data", "fsdp", "tensor", "mixed", "fsdp-tensor-untied"],
)
def test_every_mesh_gives_the_single_device_loss_and_gradient(mesh, tied):
    # Rows of uneven lengths: devices hold different counts of scored targets (case C1).
    model = tiny_model(tied=tied, layers=2)
    data, fsdp, tensor = mesh
    expected, seen = single_device(tied)
    spread = tiny_config(data_parallel=data, fsdp=fsdp, tensor_parallel=tensor)
    actual, seen_spread = gradient_of(ragged_batch(), spread, model=model)
    assert float(seen_spread.lm_loss) == pytest.approx(float(seen.lm_loss), rel=1e-5)
    assert float(seen_spread.budget_term) == pytest.approx(float(seen.budget_term), rel=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in expected.values())
    assert_params_close(actual, expected, atol=1e-5 * scale)


def test_accumulation_on_a_mesh_equals_one_device():
    config = tiny_config(accumulation=2)
    expected, _ = gradient_of(ragged_batch(), config)
    spread = tiny_config(accumulation=2, data_parallel=2, tensor_parallel=2)
    actual, _ = gradient_of(ragged_batch(), spread)
    assert_params_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_causal_attention_equals_the_mask_on_right_padded_rows(window):
    model = tiny_model(window=window)
    batch = ragged_batch()
    masked = model(batch, AllOn()).hidden
    causal = model(batch, AllOn(), causal="xla").hidden
    real = np.asarray(batch.real)
    np.testing.assert_allclose(np.asarray(causal)[real], np.asarray(masked)[real], atol=1e-5)


def test_flash_attention_runs_or_raises():
    # Here there is no GPU: it must not quietly become something else.
    with pytest.raises(Exception, match=r"(?i)cudnn"):
        gradient_of(ragged_batch(), tiny_config(attention="cudnn"))
    with pytest.raises(ValueError, match="several segments a row"):
        CalibrateConfig(packing="documents", attention="cudnn")


def test_remat_sees_the_same_noise():
    plain, seen = gradient_of(ragged_batch(), tiny_config())
    again, seen_again = gradient_of(ragged_batch(), tiny_config(remat=True))
    assert np.array_equal(seen.sampled.ffn, seen_again.sampled.ffn)
    assert_params_close(again, plain, atol=1e-6)


def test_noise_is_fresh_for_every_update_and_micro_batch():
    ids = jnp.arange(16, dtype=jnp.int32)[None]
    row = TokenBatch.from_lengths(ids)
    twice = TokenBatch(
        *(jnp.repeat(x, 2, axis=0) for x in (row.input_ids, row.positions, row.segment_ids))
    )
    config = tiny_config(sequences_per_update=1, tau_end=5.0)
    skips = [
        np.asarray(gradient_of(row, config, update=update)[1].sampled.ffn) for update in (3, 4)
    ]
    assert not np.array_equal(*skips)
    # Two micro-batches of the same row: were their noise equal, skips would be even numbers.
    both = gradient_of(twice, tiny_config(sequences_per_update=2, accumulation=2, tau_end=5.0))[1]
    assert not np.array_equal(both.sampled.ffn, 2 * skips[0])
    again = gradient_of(row, config, update=3)[1].sampled.ffn
    assert np.array_equal(again, skips[0])


def test_the_step_compiles_once():
    config, model = tiny_config(updates=5), tiny_model()
    mesh = partition.make_mesh(2)
    parts, trainable, frozen = take_apart(model, RouterParam)
    with jax.set_mesh(mesh):
        trainable, frozen = place(trainable, mesh), place(frozen, mesh)
        opt_state = init_optimizer(config, trainable, mesh)
        step = make_step(parts, model.config, config, trainable, opt_state)
        for update in range(5):
            batch = HostBatch.of(
                np.full((8, 16), update), (np.arange(16) < 3 + update) * np.ones((8, 1), int)
            )
            trainable, opt_state, _ = step(
                trainable, opt_state, frozen, on_mesh(batch, mesh), np.int32(update),
                jax.random.key(update), hyperparameters(config),
            )  # fmt: skip
        assert step._cache_size() == 1


def test_trainables_and_moments_are_donated():
    config, model = tiny_config(), tiny_model()
    mesh = partition.make_mesh()
    parts, trainable, frozen = take_apart(model, RouterParam)
    with jax.set_mesh(mesh):
        opt_state = init_optimizer(config, trainable, mesh)
        step = make_step(parts, model.config, config, trainable, opt_state)
        step(
            trainable, opt_state, frozen, ragged_batch(), np.int32(0), jax.random.key(0),
            hyperparameters(config),
        )  # fmt: skip
    assert all(value.is_deleted() for value in trainable.values())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(opt_state) if leaf.ndim)
    assert not any(value.is_deleted() for value in frozen.values())


class Absent(BaseParam):
    """A type no parameter of the model has."""


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no Absent to train"):
        take_apart(tiny_model(), Absent)
