"""The update with LoRA: what trains, dropout's noise, distillation, the same on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.train.tiny import (
    assert_params_close,
    dot_shapes,
    ragged_batch,
    tiny_config,
    tiny_model,
)
from train.data import HostBatch, on_mesh
from train.hyperparameters import hyperparameters
from train.loss import distillation_loss, scored_targets
from train.parts import place, take_apart
from train.step import accumulate_gradient, init_optimizer, make_step
from wide_jax import lora, partition
from wide_jax.params import LoRAParam, RouterParam
from wide_jax.routing import AllOn


def lora_model(dropout=0.1, dtype=jnp.float32):
    model = tiny_model(dtype=dtype)
    lora.attach(model, lora.LoRASettings(rank=2, dropout=dropout), rngs=nnx.Rngs(1))
    for number, factors in enumerate(lora.factors_of(model).values()):
        shape = factors.lora_B.shape
        factors.lora_B[...] = 0.1 * jax.random.normal(jax.random.key(number), shape)
    return model


def gradient_of(config, *, dropout=0.1, trained=(LoRAParam, RouterParam), update=3):
    model = lora_model(dropout)
    dense = lora_model(dropout)
    lora.detach(dense)
    teacher, _, _ = take_apart(dense, RouterParam)
    if dropout:
        lora.with_dropout(model, jax.random.key(9))
    parts, trainable, frozen = take_apart(model, *trained)
    mesh = partition.make_mesh(config.data_parallel, config.fsdp, config.tensor_parallel)
    rows = ragged_batch()
    host = HostBatch(*(np.asarray(x) for x in (rows.input_ids, rows.positions, rows.segment_ids)))

    def run(*arrays):
        return accumulate_gradient(
            *arrays, parts=parts, model=model.config, config=config, teacher=teacher
        )

    with jax.set_mesh(mesh):
        return jax.jit(run)(
            place(trainable, mesh),
            place(frozen, mesh),
            on_mesh(host, mesh),
            np.int32(update),
            jax.random.key(0),
            hyperparameters(config),
        )


@functools.cache
def single_device():
    return gradient_of(tiny_config(distill="beside"))


def test_stage_2_on_a_mesh_equals_one_device():
    expected, seen = single_device()
    actual, seen_spread = gradient_of(
        tiny_config(distill="beside", data_parallel=2, fsdp=2, tensor_parallel=2)
    )
    assert float(seen_spread.lm_loss) == pytest.approx(float(seen.lm_loss), rel=1e-5)
    assert float(seen_spread.kl) == pytest.approx(float(seen.kl), rel=1e-5)
    assert len(expected) == 14 + 8
    scale = max(float(jnp.abs(g).max()) for g in expected.values())
    assert_params_close(actual, expected, atol=1e-5 * scale)


def test_no_gradient_or_moment_of_the_base_exists_beside_lora():
    # D = 32 and F = 128 as in stage 1; adapters and routers make [2, .], [., 2] and [4, .] only.
    config, model = tiny_config(), lora_model()
    lora.with_dropout(model, jax.random.key(9))
    parts, trainable, frozen = take_apart(model, LoRAParam, RouterParam)
    batch, before = ragged_batch(), {k: np.array(v) for k, v in frozen.items()}

    def run(trainable):
        return accumulate_gradient(
            trainable, frozen, batch, jnp.int32(3), jax.random.key(0), hyperparameters(config),
            parts=parts, model=model.config, config=config,
        )  # fmt: skip

    base_shapes = {v.shape for v in frozen.values() if v.ndim == 2}
    base_shapes |= {shape[::-1] for shape in base_shapes}
    made = set(dot_shapes(jax.make_jaxpr(run)(trainable).jaxpr))
    assert made & {v.shape for k, v in trainable.items() if ".lora." in k}
    assert not made & base_shapes
    mesh = partition.make_mesh()
    start = jax.tree.map(jnp.copy, trainable)
    opt_state = init_optimizer(config, start, mesh)
    moments = [leaf.shape for leaf in jax.tree.leaves(opt_state) if leaf.ndim]
    assert sorted(moments) == sorted([v.shape for v in trainable.values()] * 2)
    with jax.set_mesh(mesh):
        step = make_step(parts, model.config, config, start, opt_state)
        arguments = (batch, np.int32(3), jax.random.key(0), hyperparameters(config))
        after, _, _ = step(start, opt_state, frozen, *arguments)
    assert any(np.any(after[name] != value) for name, value in trainable.items())
    for name, value in before.items():
        assert value.tobytes() == np.asarray(frozen[name]).tobytes(), name


def test_a_rematerialised_forward_drops_the_same_elements():
    expected, _ = single_device()
    actual, _ = gradient_of(tiny_config(distill="beside", remat=True))
    assert_params_close(actual, expected, atol=1e-5)


def test_dropout_is_fresh_for_every_update_and_off_without_a_key():
    config = tiny_config(freeze_routers=True)
    trained = (LoRAParam,)
    first = gradient_of(config, trained=trained)[1].lm_loss
    second = gradient_of(config, trained=trained, update=4)[1].lm_loss
    none = gradient_of(config, trained=trained, dropout=0.0)
    assert len({float(first), float(second), float(none[1].lm_loss)}) == 3
    # Frozen routers: no noise either, so without dropout every update sees the same.
    again = gradient_of(config, trained=trained, dropout=0.0, update=4)
    assert float(again[1].lm_loss) == float(none[1].lm_loss)


def test_only_distilling_leaves_the_cross_entropy_out_of_the_gradient():
    both, _ = single_device()
    only, seen = gradient_of(tiny_config(distill="only"))
    heavy, _ = gradient_of(tiny_config(distill="only", distill_weight=2.0, alpha=0.0))
    light, _ = gradient_of(tiny_config(distill="only", distill_weight=1.0, alpha=0.0))
    assert float(seen.lm_loss) > 0  # still reported
    name = next(name for name in only if name.endswith("lora_B"))
    assert not np.allclose(only[name], both[name], atol=1e-4)
    # Twice the weight is twice the gradient: nothing else is in it.
    scale = max(float(jnp.abs(g).max()) for g in light.values())
    assert_params_close(heavy, {k: 2 * v for k, v in light.items()}, atol=1e-5 * scale)


def test_distilling_without_a_teacher_is_refused():
    model = tiny_model()
    config = tiny_config(distill="only")
    parts, trainable, _ = take_apart(model, RouterParam)
    opt_state = init_optimizer(config, trainable, partition.make_mesh())
    with pytest.raises(ValueError, match="distill='only' needs the structure of a teacher"):
        make_step(parts, model.config, config, trainable, opt_state)


def test_the_kl_is_the_formulas_and_zero_to_itself():
    rng = np.random.default_rng(0)
    student, teacher = (jnp.asarray(rng.normal(size=(8, 16, 6)), jnp.float32) for _ in range(2))
    head = jnp.asarray(rng.normal(size=(6, 13)), jnp.float32)
    batch = ragged_batch()

    def kl(student):
        logits = lambda h: h @ head  # noqa: E731
        return distillation_loss(student, logits, teacher, logits, batch, chunk=5).total

    def naive(student):
        p, q = jax.nn.softmax(teacher @ head), jax.nn.softmax(student @ head)
        return jnp.sum(jnp.sum(p * jnp.log(p / q), axis=-1) * scored_targets(batch))

    value, gradient = jax.value_and_grad(kl)(student)
    expected, expected_gradient = jax.value_and_grad(naive)(student)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)
    assert float(kl(teacher)) == pytest.approx(0.0, abs=1e-4)


def test_the_teacher_is_the_dense_base_without_lora():
    # Masks all on and a LoRA that does nothing: student and teacher are one model.
    model = tiny_model()
    lora.attach(model, lora.LoRASettings(rank=2, dropout=0.0), rngs=nnx.Rngs(1))
    batch = ragged_batch()
    dense = tiny_model()
    assert np.array_equal(model(batch, AllOn()).hidden, dense(batch, AllOn()).hidden)
    for layer in model.model.layers:
        for router in (layer.router_attention, layer.router_ffn):
            router.router.bias[...] = jnp.where(jnp.arange(router.router.bias.size) % 2, -1e4, 1e4)
    parts, trainable, frozen = take_apart(model, LoRAParam)
    teacher, _, _ = take_apart(dense, RouterParam)
    config = tiny_config(distill="beside", freeze_routers=True)
    _, seen = accumulate_gradient(
        trainable, frozen, batch, jnp.int32(0), jax.random.key(0), hyperparameters(config),
        parts=parts, model=model.config, config=config, teacher=teacher,
    )  # fmt: skip
    assert float(seen.kl) == pytest.approx(0.0, abs=1e-5)


def test_case_C5_trained_leaves_and_moments_are_float32_in_a_bf16_model():
    model, config = lora_model(dtype=jnp.bfloat16), tiny_config(updates=2, warmup_fraction=0.0)
    mesh = partition.make_mesh()
    parts, trainable, frozen = take_apart(model, LoRAParam, RouterParam)
    with jax.set_mesh(mesh):
        opt_state = init_optimizer(config, trainable, mesh)
        step = make_step(parts, model.config, config, trainable, opt_state)
        before = {name: np.asarray(value) for name, value in trainable.items()}
        trainable, opt_state, metrics = step(
            trainable,
            opt_state,
            frozen,
            ragged_batch(),
            np.int32(1),
            jax.random.key(0),
            hyperparameters(config),
        )
    leaves = [*trainable.values(), *(x for x in jax.tree.leaves(opt_state) if x.ndim)]
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in frozen.values()} == {jnp.dtype(jnp.bfloat16)}
    assert all((np.asarray(trainable[name]) != before[name]).any() for name in before)
    assert metrics.lm_loss.dtype == jnp.float32
