"""Runs that differ in targets, schedules, weights and seed have the same compiled program."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.train.tiny import ragged_batch, tiny_config, tiny_model
from train.hyperparameters import hyperparameters
from train.parts import take_apart
from train.step import init_optimizer, make_step
from wide_jax import lora, partition
from wide_jax.batch import TokenBatch
from wide_jax.params import LoRAParam, RouterParam

OTHER = {
    "sparsity": 0.7,
    "attention_sparsity": 0.6,
    "ffn_sparsity": 0.8,
    "alpha": 3.0,
    "distill_weight": 0.5,
    "learning_rate": 1e-4,
    "updates": 77,
    "warmup_fraction": 0.3,
    "tau_start": 4.0,
    "tau_end": 0.25,
    "seed": 5,
}


def program(stage=1, **changes):
    """The text of the step's program for a run with these settings."""
    config = tiny_config(**changes)
    model = tiny_model(seed=config.seed)
    if stage == 2:
        lora.attach(model, lora.LoRASettings(rank=2), rngs=nnx.Rngs(config.seed))
    dense = nnx.clone(model)
    lora.detach(dense)
    teacher, _, _ = take_apart(dense, RouterParam)
    if stage == 2:
        lora.with_dropout(model, jax.random.key(config.seed))
    trained = (RouterParam,) if stage == 1 else (LoRAParam, RouterParam)
    parts, trainable, frozen = take_apart(model, *trained)
    mesh = partition.make_mesh()
    with jax.set_mesh(mesh):
        opt_state = init_optimizer(config, trainable, mesh)
        step = make_step(parts, model.config, config, trainable, opt_state, teacher=teacher)
        rows, key = ragged_batch(), jax.random.key(config.seed)

        def run(trainable, opt_state, frozen, ids, positions, segments, number, key, numbers):
            batch = TokenBatch(ids, positions, segments)
            hyper = jax.tree.unflatten(tree, numbers)
            return step(trainable, opt_state, frozen, batch, number, key, hyper)

        numbers, tree = jax.tree.flatten(hyperparameters(config))
        tokens = (rows.input_ids, rows.positions, rows.segment_ids)
        inputs = (trainable, opt_state, frozen, *tokens, np.int32(0), key, numbers)
        return jax.jit(run).lower(*inputs).as_text()


@pytest.mark.parametrize(
    ("stage", "budget", "distill"),
    [(1, "separate", "off"), (1, "flops", "off"), (2, "separate", "beside")],
)
def test_runs_of_one_kind_share_their_program(stage, budget, distill):
    kind = {"stage": stage, "budget": budget, "distill": distill}
    other = OTHER if budget == "separate" else {k: v for k, v in OTHER.items() if "n_spa" not in k}
    assert program(**kind) == program(**kind, **other)


def test_another_kind_is_another_program():
    assert program(budget="paper") != program(budget="separate")
    assert program(alpha=1.0, weight_decay=0.5) != program(alpha=1.0)  # Adam's constants are in it


def test_every_number_reaches_the_step():
    """Each field comes from its setting, so that none is forgotten and none is another's."""
    plain = hyperparameters(tiny_config())
    same = {"seed", "warmup_fraction"}
    for name, value in OTHER.items():
        changed = jax.tree.leaves(hyperparameters(tiny_config(**{name: value})))
        differ = sum(a != b for a, b in zip(jax.tree.leaves(plain), changed, strict=True))
        # Both modules follow `sparsity`, and the warm-up the number of updates.
        expected = {"sparsity": 3, "updates": 2, "warmup_fraction": 1}.get(name, name not in same)
        assert differ == expected, name
    assert {x.dtype for x in jax.tree.leaves(plain)} == {np.dtype(np.float32)}
