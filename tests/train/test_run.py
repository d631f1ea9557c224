"""Whole runs in a folder: started, killed, resumed exactly, on any mesh; both stages (case C9)."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from train import metrics, run
from train.checkpoint import CheckpointMismatchError, Checkpoints
from train.loop import TrainState
from train.records import LossNotFiniteError
from train.run import RunEvents, calibrate_main, check_start, recover_main
from train.run_config import INHERITED, CalibrateConfig, RecoverConfig, dump, load
from wide_jax import partition
from wide_jax.batch import TokenBatch
from wide_jax.hf.peft import read_adapter
from wide_jax.hf.pretrained import from_pretrained
from wide_jax.hf.wide_folder import load_wide_info, load_wide_routers, set_thresholds
from wide_jax.routing import AllOn, Argmax


@pytest.fixture
def settings(model_folder, text_file, tmp_path):
    """Settings of a run of 6 updates in `tmp_path/run`."""

    def make(kind=CalibrateConfig, out="run", **changes):
        values = {
            "model": str(model_folder),
            "data": (str(text_file),),
            "cache_dir": tmp_path / "tokens",
            "out": tmp_path / out,
            "updates": 6,
            "sequences_per_update": 8,
            "sequence_length": 16,
            "sparsity": 0.25,
            "ffn_group_size": 16,
            "router_rank": 4,
            "log_every": 1,
            "save_every": 6,  # a checkpoint every 3
            "threshold_rows": 0,
        }
        if issubclass(kind, RecoverConfig):
            values |= {"lora_rank": 2}
        return kind(**(values | changes))

    return make


def losses(folder):
    return {
        line["update"]: (line["lm_loss"], line["budget_term"])
        for line in metrics.read(folder)
        if line["kind"] == "train"
    }


def interrupt_after(monkeypatch, updates):
    """Make runs end with an exception once `updates` updates are reported."""
    seen = []

    def record(record, config):
        seen.append(record)
        if len(seen) == updates:
            raise KeyboardInterrupt

    return RunEvents(record=record)


def routers(folder):
    info = load_wide_info(folder)
    config = from_pretrained(folder).config
    return {k: np.asarray(v) for k, v in load_wide_routers(folder, config, info.wide).items()}


def test_case_C9_a_resumed_run_is_bit_identical(settings, text_file, monkeypatch):
    """Its text, fetched again in between, is the same text."""
    whole = calibrate_main(settings(out="whole"))
    with pytest.raises(KeyboardInterrupt):
        calibrate_main(settings(), interrupt_after(monkeypatch, 5))
    os.utime(text_file, (0, 0))
    messages = []
    resumed = calibrate_main(settings(), RunEvents(message=messages.append))
    assert "resuming at update 3 of 6" in messages[0]
    expected, actual = routers(whole.model_folder), routers(resumed.model_folder)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert value.tobytes() == actual[name].tobytes(), name
    one, other = losses(settings(out="whole").out), losses(settings().out)
    assert list(other) == list(range(6))
    assert one == other


MESHES = {
    1: {},
    2: {"data_parallel": 2},
    8: {"data_parallel": 2, "fsdp": 2, "tensor_parallel": 2},
}


@pytest.mark.parametrize(("before", "after"), [(1, 8), (2, 1), (8, 2)])
def test_case_C9_a_run_goes_on_with_another_number_of_devices(settings, monkeypatch, before, after):
    calibrate_main(settings(out="whole"))
    with pytest.raises(KeyboardInterrupt):
        calibrate_main(settings(**MESHES[before]), interrupt_after(monkeypatch, 5))
    calibrate_main(settings(**MESHES[after]))
    one, other = losses(settings(out="whole").out), losses(settings().out)
    np.testing.assert_allclose(
        [other[n] for n in range(6)], [one[n] for n in range(6)], rtol=1e-6, atol=1e-6
    )


def test_finishing_twice_changes_nothing(settings):
    first = calibrate_main(settings(updates=2))
    again = calibrate_main(settings(updates=2))
    assert again.model_folder == first.model_folder
    assert again.last is None


def test_case_C9_another_runs_folder_is_refused_with_what_differs(settings):
    calibrate_main(settings(updates=2))
    with pytest.raises(CheckpointMismatchError, match=r"seed: 0, not 1"):
        calibrate_main(settings(updates=2, seed=1))
    # What changes no number may change.
    calibrate_main(settings(updates=2, save_every=1, fsdp=2))


def test_a_folder_of_something_else_is_refused(settings):
    config = settings()
    config.out.mkdir()
    (config.out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"not empty and holds no config\.yaml"):
        calibrate_main(config)


def test_case_C9_a_half_written_checkpoint_is_never_the_latest(settings, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        calibrate_main(settings(), interrupt_after(monkeypatch, 5))
    folder = settings().out / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["3"]
    (folder / "6.orbax-checkpoint-tmp").mkdir()
    (folder / "6.orbax-checkpoint-tmp" / "state").write_bytes(b"half")
    checkpoints = Checkpoints(folder, {}, keep=2)
    assert checkpoints.latest == 3
    checkpoints.close()


def test_a_run_without_a_checkpoint_says_that_it_starts_again(settings, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        calibrate_main(settings(), interrupt_after(monkeypatch, 2))
    messages = []
    events = dataclasses.replace(interrupt_after(monkeypatch, 1), message=messages.append)
    with pytest.raises(KeyboardInterrupt):
        calibrate_main(settings(), events)
    assert "checkpoints holds no complete checkpoint: starting at update 0" in messages[0]


def test_case_C9_a_checkpoint_of_another_version_is_refused_with_what_to_do(tmp_path, monkeypatch):
    state = TrainState({"a": jax.numpy.zeros(2)}, (), 1)
    with monkeypatch.context() as earlier:
        earlier.setattr("train.checkpoint.FORMAT", 1)
        written = Checkpoints(tmp_path, {}, keep=1)
        written.save(state)
        written.close()
    checkpoints = Checkpoints(tmp_path, {}, keep=1)
    with pytest.raises(
        CheckpointMismatchError, match=r"format 1, expected 2.*choose another run folder"
    ):
        checkpoints.restore(state)
    checkpoints.close()


def test_case_C9_a_checkpoint_of_another_model_or_text_is_refused_with_what_differs(tmp_path):
    def state(**shapes):
        return TrainState({name: jax.numpy.zeros(shape) for name, shape in shapes.items()}, (), 1)

    ours = Checkpoints(tmp_path, {"seed": 0, "data_content": "ours"}, keep=1)
    ours.save(state(a=(2,), b=(3,)))
    ours.close()
    theirs = Checkpoints(tmp_path, {"seed": 0, "data_content": "theirs"}, keep=1)
    with pytest.raises(CheckpointMismatchError) as error:
        theirs.restore(state(a=(4,), c=(1,)))
    theirs.close()
    for part in (
        "checkpoint 1 in", "data_content: 'ours', not 'theirs'", "it lacks c",
        "it has an unknown b", "a has shape (2,), not (4,)",
    ):  # fmt: skip
        assert part in str(error.value)


def test_case_C9_relative_paths_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("some/folder", {}, keep=1)
    assert checkpoints.latest is None
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoints.restore(TrainState({}, (), 0))
    checkpoints.close()
    assert (tmp_path / "some" / "folder").is_dir()


class WrittenAtTheLastMoment(Checkpoints):
    """Writes nothing before it is waited for: the slowest that writing in the background can be."""

    held: TrainState | None = None

    def save(self, state):
        self.wait()
        arrays = jax.tree.map(lambda x: x.copy(), (state.trainable, state.opt_state))
        self.held = TrainState(*arrays, state.update)

    def wait(self):
        if self.held is not None:
            held, self.held = self.held, None
            super().save(held)
        super().wait()


def complete(folder):
    """The updates that the complete checkpoints in a folder continue with."""
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


@pytest.mark.parametrize("save_every", [1, 5])
def test_case_C9_at_no_moment_more_than_the_interval_is_unsaved(settings, monkeypatch, save_every):
    monkeypatch.setattr(run, "Checkpoints", WrittenAtTheLastMoment)
    config = settings(updates=12, save_every=save_every)
    unsaved = []

    def record(record, config):
        begun = min(record.update + 2, config.updates)  # an update is reported while the next runs
        unsaved.append(begun - max(complete(config.out / "checkpoints"), default=0))

    calibrate_main(config, RunEvents(record=record))
    assert len(unsaved) == 12
    assert max(unsaved) <= save_every
    assert config.checkpoint_every == max(save_every // 2, 1)


def test_case_C9_a_checkpoint_begins_when_the_one_before_is_complete(tmp_path):
    checkpoints = Checkpoints(tmp_path, {}, keep=4)
    for update in range(1, 5):
        checkpoints.save(TrainState({"a": jax.numpy.zeros(1000)}, (), update))
        assert set(range(1, update)) <= set(complete(tmp_path))
    checkpoints.wait()
    assert sorted(complete(tmp_path)) == [1, 2, 3, 4]
    checkpoints.close()


def test_case_C9_kill_9_loses_at_most_the_interval(settings):
    config = settings(updates=40, save_every=2)
    arguments = [f"{k}={v}" for k, v in {
        "model": config.model, "data": config.data[0], "cache_dir": config.cache_dir,
        "out": config.out, "updates": 40, "sequences_per_update": 8, "sequence_length": 16,
        "sparsity": 0.25, "ffn_group_size": 16, "router_rank": 4, "log_every": 1, "save_every": 2,
        "threshold_rows": 0,
    }.items()]  # fmt: skip
    code = (
        "import sys; from train.run import calibrate_main; from train.run_config import *;"
        "calibrate_main(parse(CalibrateConfig, sys.argv[1:], prog='test'))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, *arguments])
    lines = config.out / metrics.FILE
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and child.poll() is None:
        if lines.exists() and len(lines.read_text().splitlines()) >= 7:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    reported = max(losses(config.out))
    checkpoints = Checkpoints(config.out / "checkpoints", {}, keep=2)
    latest = checkpoints.latest
    checkpoints.close()
    assert latest is not None
    assert latest >= reported + 1 - config.save_every
    messages = []
    calibrate_main(config, RunEvents(message=messages.append))
    assert f"resuming at update {latest} of 40" in messages[0]
    assert sorted(losses(config.out)) == list(range(40))


def test_stage_2_trains_lora_and_routers_from_stage_1(settings, model_folder):
    calibrate_main(settings(updates=2))
    stage_1 = routers(settings().out / "model")
    config = settings(
        RecoverConfig, "recovered", run=settings().out, updates=3, warmup_fraction=0.0, model=None,
        distill="beside",
    )  # fmt: skip
    result = recover_main(config)
    assert result.last.kl > 0
    folder = result.model_folder
    info = load_wide_info(folder)
    assert (info.lora, info.training["stage"]) == ("adapter", 2)
    after = routers(folder)
    assert all((after[name] != value).any() for name, value in stage_1.items())
    base = from_pretrained(model_folder)
    adapter = read_adapter(folder, base.config)
    assert len(adapter.factors) == 7
    assert all(np.asarray(b).any() for _, b in adapter.factors.values())
    # The saved model is the trained one: base weights untouched, adapter merged on loading.
    batch = TokenBatch.from_lengths(jax.numpy.arange(16)[None])
    merged = from_pretrained(folder)
    apart = from_pretrained(folder, adapter=False)
    assert np.array_equal(apart(batch, AllOn()).hidden, base(batch, AllOn()).hidden)
    assert not np.allclose(merged(batch, Argmax()).hidden, apart(batch, Argmax()).hidden)


def test_stage_2_goes_on_from_where_the_dial_stands(settings, monkeypatch):
    """Sampled and argmax masks of its first update obey the thresholds; the result needs none."""
    model = calibrate_main(settings(updates=1)).model_folder
    config = settings(
        RecoverConfig, "recovered", run=settings().out, updates=3, warmup_fraction=0.0, model=None,
        save_every=1,
    )  # fmt: skip
    # Thresholds that no margin reaches and that every margin exceeds.
    set_thresholds(model, attention=1e3, ffn=-1e3, rates={"attention": 1.0, "ffn": 0.0})
    messages, records = [], []
    events = RunEvents(
        message=messages.append, record=lambda record, config: records.append(record)
    )
    result = recover_main(config, events)
    assert "attention +1000.000, ffn -1000.000" in messages[0]
    for rates in (records[0].skip, records[0].hard_skip):
        assert (rates["attention"], rates["ffn"]) == (1.0, 0.0)
    info = load_wide_info(result.model_folder)
    assert (info.wide.attention_threshold, info.wide.ffn_threshold) == (0.0, 0.0)
    batch = TokenBatch.from_lengths(jax.numpy.arange(16)[None])
    masks = from_pretrained(result.model_folder)(batch, Argmax()).masks
    assert not any(mask.any() for mask in masks.attention)
    assert all(mask.all() for mask in masks.ffn)


def test_frozen_routers_stay_bit_identical_in_stage_2(settings):
    calibrate_main(settings(updates=2))
    before = routers(settings().out / "model")
    config = settings(
        RecoverConfig, "recovered", run=settings().out, updates=2, warmup_fraction=0.0,
        freeze_routers=True, model=None,
    )  # fmt: skip
    result = recover_main(config)
    after = routers(result.model_folder)
    for name, value in before.items():
        assert value.tobytes() == after[name].tobytes(), name
    assert result.last.skip == result.last.hard_skip


def test_stage_2_needs_a_finished_stage_1(settings, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no finished stage 1"):
        recover_main(settings(RecoverConfig, run=tmp_path / "empty", model=None))
    with pytest.raises(ValueError, match="--run"):
        recover_main(settings(RecoverConfig, model=None))


def test_stage_2_aims_at_what_stage_1_aimed_at_or_is_asked_to_retarget(settings):
    calibrate_main(settings(updates=1))
    other = {"run": settings().out, "updates": 1, "model": None, "sparsity": 0.5}
    with pytest.raises(ValueError, match=r"'ffn': 0\.25.*'ffn': 0\.5.*ask to retarget"):
        recover_main(settings(RecoverConfig, "recovered", **other))
    assert not settings(out="recovered").out.exists()
    result = recover_main(settings(RecoverConfig, "recovered", retarget=True, **other))
    assert load_wide_info(result.model_folder).targets == {"attention": 0.5, "ffn": 0.5}


def test_stage_2_takes_the_routers_of_its_stage_1_as_they_are(settings):
    calibrate_main(settings(updates=1))
    more = {"run": settings().out, "updates": 1, "model": None}
    with pytest.raises(ValueError, match="ffn_group_size=32, not 16"):
        recover_main(settings(RecoverConfig, "recovered", **more, ffn_group_size=32))
    with pytest.raises(ValueError, match="with --run alone"):
        recover_main(settings(RecoverConfig, "recovered", **(more | {"model": "another"})))
    assert not settings(out="recovered").out.exists()
    given = {name: getattr(RecoverConfig(), name) for name in INHERITED}
    config = settings(RecoverConfig, "recovered", **more, **given)
    recover_main(config)
    stored = load(RecoverConfig, config.out / "config.yaml")
    assert (stored.ffn_group_size, stored.attn_group_size, stored.router_rank) == (16, 2, 4)
    assert recover_main(config).last is None  # the same command again


def test_what_can_be_known_before_the_weights_are_read_is_said_before(settings, monkeypatch):
    monkeypatch.setattr(run, "from_pretrained", None)  # nothing may get that far
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        calibrate_main(settings(data=("nowhere.jsonl",)))
    with pytest.raises(FileNotFoundError, match=r"held\.jsonl: no such file"):
        calibrate_main(settings(evaluation_data=("held.jsonl",)))
    assert not check_start(settings())
    config = settings()
    config.out.mkdir()
    dump(config, config.out / "config.yaml")
    assert check_start(config)


def test_static_width_decides_the_same_for_every_token(settings):
    result = calibrate_main(settings(method="static", updates=8, learning_rate=0.5))
    model = from_pretrained(result.model_folder)
    batch = TokenBatch.from_lengths(jax.numpy.arange(48).reshape(3, 16) % 60)
    masks = model(batch, Argmax()).masks
    for mask in (*masks.attention, *masks.ffn):
        assert (np.asarray(mask) == np.asarray(mask)[0, 0]).all()
    biases = [v for k, v in routers(result.model_folder).items() if k.endswith("router.bias")]
    assert all(bias.any() for bias in biases)


def test_static_width_settles_in_a_short_run(settings):
    """Its margins move further than two biases could at this learning rate, in as many updates."""
    updates, rate = 8, 0.01
    result = calibrate_main(settings(method="static", updates=updates, learning_rate=rate))
    found = routers(result.model_folder)
    margins = [
        np.diff((found[name] @ found[_compressor(name)] + found[_bias(name)]).reshape(-1, 2))
        for name in found
        if name.endswith(".router.weight")
    ]
    assert max(np.abs(margin).max() for margin in margins) > 2 * updates * rate


def _compressor(name):
    return name.replace(".router.weight", ".compressor.bias")


def _bias(name):
    return name.replace(".router.weight", ".router.bias")


def test_layer_skipping_has_one_decision_a_layer(settings):
    result = calibrate_main(settings(method="layer", updates=4, learning_rate=0.1))
    assert load_wide_info(result.model_folder).wide.one_router
    assert result.last.skip["attention"] == result.last.skip["ffn"]
    model = from_pretrained(result.model_folder)
    batch = TokenBatch.from_lengths(jax.numpy.arange(48).reshape(3, 16) % 60)
    masks = model(batch, Argmax()).masks
    assert masks.attention[0].shape == (3, 16, 1)
    for attention, ffn in zip(masks.attention, masks.ffn, strict=True):
        assert np.array_equal(attention, ffn)
    with pytest.raises(ValueError, match="method='layer' skips both modules"):
        settings(method="layer", target="ffn")


def test_an_untargeted_module_never_skips(settings):
    result = calibrate_main(settings(target="ffn", budget="paper"))
    assert result.last.skip["attention"] == 0.0
    assert 0 < result.last.skip["ffn"] < 1
    assert result.last.budget_term == pytest.approx(abs(0.25 - result.last.skip["ffn"]), abs=1e-5)
    model = from_pretrained(result.model_folder)
    batch = TokenBatch.from_lengths(jax.numpy.arange(16)[None])
    assert all(np.asarray(mask).all() for mask in model(batch, Argmax()).masks.attention)


def test_held_out_perplexity_and_events_are_written(settings, text_file, tmp_path):
    seen, logged = [], []
    pages = tmp_path / "pages.jsonl"  # its field is another than the training text's
    pages.write_text(text_file.read_text().replace('{"text"', '{"page"'))
    config = settings(
        evaluation_data=(str(pages),), evaluation_text_field="page", evaluation_rows=8,
        evaluate_every=3, updates=4,
    )  # fmt: skip
    result = calibrate_main(
        config,
        RunEvents(
            held_out=lambda update, r: seen.append((update, r)),
            logged=lambda update, values: logged.append({"update": update, **values}),
        ),
    )
    assert [{"kind": "train", **line} for line in logged] == [
        line for line in metrics.read(config.out) if line["kind"] == "train"
    ]
    assert [update for update, _ in seen] == [3, 4]
    assert result.held_out == seen[-1][1]
    assert seen[0][1].tokens == 8 * 15
    assert 1 < seen[0][1].token_perplexity < 1e6
    kinds = [(line["kind"], line["update"]) for line in metrics.read(config.out)]
    assert ("held_out", 2) in kinds
    assert sum(kind == "train" for kind, _ in kinds) == 4
    speed = [
        line["tokens_per_second"] for line in metrics.read(config.out) if line["kind"] == "train"
    ]
    assert speed[0] is None
    assert all(value > 0 for value in speed[1:])
    events = list((config.out / "tensorboard").iterdir())
    assert len(events) == 1
    assert b"train/hard_skip/flops" in events[0].read_bytes()


def test_a_finished_run_skips_its_target_with_argmax_masks(settings, text_file):
    goals = {"attention_sparsity": 0.3, "ffn_sparsity": 0.2, "updates": 2}
    as_trained = calibrate_main(settings(out="as_trained", **goals))
    config = settings(
        threshold_rows=32, evaluation_data=(str(text_file),), evaluation_rows=8, **goals
    )
    messages = []
    result = calibrate_main(config, RunEvents(message=messages.append))
    (line,) = [line for line in metrics.read(config.out) if line["kind"] == "threshold"]
    assert abs(line["before"]["attention"] - 0.3) > 0.05  # two updates train nothing
    assert line["after"]["attention"] == pytest.approx(0.3, abs=0.01)
    assert line["after"]["ffn"] == pytest.approx(0.2, abs=0.01)
    assert any("with argmax masks" in message for message in messages)
    # The saved routers are the trained ones but for the execute biases.
    info = load_wide_info(result.model_folder)
    assert info.training["moved_biases"] == line["biases"]
    before, after = routers(as_trained.model_folder), routers(result.model_folder)
    for name, value in after.items():
        moved = line["biases"][next(m for m in line["biases"] if f".router_{m}." in name)]
        expected = before[name].copy()
        if name.endswith(".router.bias"):
            expected[::2] += np.float32(moved)
        assert np.array_equal(value, expected), name
    # Held out it is close too: the text is of the same kind.
    assert result.held_out.skip["attention"] == pytest.approx(0.3, abs=0.05)
    kinds = [entry["kind"] for entry in metrics.read(config.out)]
    assert kinds[-2:] == ["threshold", "final"]
    assert "held_out" in kinds


def test_a_loss_over_its_limit_stops_with_position_and_last_checkpoint(settings):
    with pytest.raises(
        LossNotFiniteError, match=r"update 0: .*loss_limit=0\.5.*rows 0 to 7.*no checkpoint"
    ):
        calibrate_main(settings(loss_limit=0.5))
    limit = {}

    def record(record, config):
        limit[record.update] = record.lm_loss

    calibrate_main(settings(out="other"), RunEvents(record=record))
    assert max(limit.values()) < 25


def test_weights_go_to_their_shards(settings, monkeypatch):
    config = settings(fsdp=2, tensor_parallel=2)
    mesh = partition.make_mesh(1, 2, 2)
    loaded = run._load_for_calibration(config, mesh)
    weight = loaded.model.model.layers[0].mlp.gate_proj.weight[...]
    assert weight.sharding.shard_shape(weight.shape) == (64, 16)


def test_settings_that_are_missing_are_named(settings):
    with pytest.raises(ValueError, match="--out"):
        calibrate_main(dataclasses.replace(settings(), out=None))
    with pytest.raises(ValueError, match="--data"):
        calibrate_main(dataclasses.replace(settings(), data=()))


def test_importing_train_starts_no_device():
    code = "import train, sys; assert 'orbax' not in sys.modules and 'datasets' not in sys.modules"
    code += "; import jax._src.xla_bridge as bridge; assert not bridge._backends"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
