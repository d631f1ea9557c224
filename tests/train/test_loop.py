"""Whole runs: the target is reached, the loss falls, numbers come in order, NaN stops."""

import types

import numpy as np
import pytest
from flax import nnx

from tests.train.tiny import tiny_config, tiny_model, tiny_tokens
from train.data import PackedWindows
from train.loop import TrainState, calibrate, run_updates
from train.records import LossNotFiniteError
from wide_jax import partition
from wide_jax.config import WideConfig
from wide_jax.model import WideForCausalLM


@pytest.mark.parametrize("groups", [16, 128], ids=["groups", "depth"])
def test_calibration_reaches_its_target(groups):
    model = tiny_model(groups=groups)
    config = tiny_config(updates=120, sparsity=0.25, learning_rate=2e-2)
    history = calibrate(model, tiny_tokens(), config).history
    last = history[-20:]
    for module in ("attention", "ffn"):
        assert history[0].skip[module] == pytest.approx(0.5, abs=0.2)
        assert np.mean([r.skip[module] for r in last]) == pytest.approx(0.25, abs=0.05)
        assert np.mean([r.hard_skip[module] for r in last]) == pytest.approx(0.25, abs=0.12)


def test_records_come_in_order_one_per_update():
    seen = []
    result = calibrate(tiny_model(), tiny_tokens(), tiny_config(), on_update=seen.append)
    assert [record.update for record in seen] == list(range(8))
    assert tuple(seen) == result.history
    assert seen[0].temperature == 5.0
    assert seen[-1].temperature == pytest.approx(0.5, rel=1e-5)
    assert all(record.tokens == 8 * 16 for record in seen)


def test_metrics_are_fetched_while_the_next_update_runs():
    seen, config = [], tiny_config(updates=3)

    class Step:
        def __call__(self, trainable, opt_state, frozen, batch, update, key, hyper):
            seen.append(f"start {update}")
            return trainable, opt_state, update

        def lower(self, *arguments):
            raise AssertionError("nobody asked for it")

    batches = PackedWindows(tiny_tokens(), 16, config.sequences_per_update, seed=0)
    mesh = partition.make_mesh()
    report = lambda update: seen.append(f"fetch {update}")  # noqa: E731
    state = run_updates(Step(), TrainState({}, (), 0), {}, batches, mesh, config, report=report)
    assert state.update == 3
    assert seen == ["start 0", "start 1", "fetch 0", "start 2", "fetch 1", "fetch 2"]


def test_the_step_can_be_compiled_before_the_first_update_if_one_is_left():
    seen, config = [], tiny_config(updates=2)

    class Step:
        def __call__(self, trainable, opt_state, frozen, batch, update, key, hyper):
            seen.append((int(update), batch.input_ids.tolist()))
            return trainable, opt_state, update

        def lower(self, trainable, opt_state, frozen, batch, update, key, hyper):
            seen.append(("compiled for", int(update), batch.input_ids.tolist()))
            return types.SimpleNamespace(compile=lambda: None)

    def before_first(compile_step):
        seen.append("before")
        compile_step()

    batches = PackedWindows(tiny_tokens(), 16, config.sequences_per_update, seed=0)
    mesh = partition.make_mesh()
    for begun in (1, 2):
        seen.clear()
        run_updates(
            Step(), TrainState({}, (), begun), {}, batches, mesh, config,
            report=lambda update: None, before_first=before_first,
        )  # fmt: skip
        if begun == 1:
            [before, (_, number, batch), update] = seen
            assert (before, number) == ("before", 1)
            assert update == (1, batch)
    assert seen == []


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    runs = [
        calibrate(tiny_model(), tiny_tokens(), tiny_config(updates=3, seed=seed)).history
        for seed in (0, 0, 1)
    ]
    losses = [[record.lm_loss for record in history] for history in runs]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_a_nan_stops_the_run_with_its_update_and_leaves_the_model_alone():
    model = tiny_model()
    weight = model.model.layers[0].mlp.down_proj.weight
    weight[...] = weight[...].at[0, 0].set(np.nan)
    router = np.asarray(model.model.layers[0].router_ffn.router.weight[...])
    with pytest.raises(LossNotFiniteError, match="update 0: loss nan"):
        calibrate(model, tiny_tokens(), tiny_config())
    assert np.array_equal(router, model.model.layers[0].router_ffn.router.weight[...])


def test_a_trained_model_still_runs_on_its_own_device():
    model = tiny_model()
    device = model.model.norm.weight[...].sharding
    calibrate(model, tiny_tokens(), tiny_config(updates=2, data_parallel=4, tensor_parallel=2))
    assert model.model.layers[0].router_ffn.router.weight[...].sharding == device


def test_too_few_tokens_and_a_model_without_routers_are_refused():
    with pytest.raises(ValueError, match="15 tokens make no window of sequence_length=16"):
        calibrate(tiny_model(), tiny_tokens(15), tiny_config())
    dense = WideForCausalLM(tiny_model().config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no RouterParam to train"):
        calibrate(dense, tiny_tokens(), tiny_config())


def test_a_mesh_that_cuts_groups_is_refused_with_the_numbers():
    model = tiny_model()
    wide = WideConfig.for_model(model.config, attn_group_size=8, ffn_group_size=128)
    depth = WideForCausalLM(model.config, wide, rngs=nnx.Rngs(0))
    calibrate(depth, tiny_tokens(), tiny_config(updates=1, tensor_parallel=4))  # whole shards: fine
    with pytest.raises(ValueError, match="num_attention_heads=8 is not a multiple of tensor=3"):
        calibrate(model, tiny_tokens(), tiny_config(tensor_parallel=3))
