"""The speed measurement runs the real step and fills a record; `wide bench train` combines them."""

import json

import jax
import numpy as np
import pytest

from eval.records import COMMON, FIELDS, check_record, common_fields
from tests.train.tiny import tiny_config, tiny_model
from train import bench
from train.bench import measure, prepare, record_fields, start
from train.flops import step_flops_per_token
from wide_jax import shapes
from wide_jax.cli.bench_train import Args, main


@pytest.mark.parametrize("stage", [1, 2])
def test_measuring_a_stage_gives_a_whole_record(stage):
    model = tiny_model()
    config = tiny_config(data_parallel=2, fsdp=2, tensor_parallel=2)
    prepared = prepare(model.config, model.wide, config, stage=stage, dtype="float32")
    state, frozen = start(prepared)
    seen = []
    timing, state = measure(
        prepared, state, frozen, updates=3, warm_up=2,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert state.update == 5
    assert len(timing.seconds) == 3
    assert len(timing.losses) == len(timing.gradient_norms) == 5
    assert timing.tokens_per_second == pytest.approx(8 * 16 / sorted(timing.seconds)[1])
    assert (timing.mfu, seen[-1]) == (None, (5, 5))  # a CPU's peak is not known
    record = common_fields("train", command="test") | record_fields(prepared, timing, model="tiny")
    check_record(record, "test")
    assert set(COMMON) | set(FIELDS["train"]) <= set(record)
    assert "--xla_force_host_platform_device_count" in record["xla_flags"]
    assert record["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    # The plan is the compiler's: it knows the weights, and a step needs more than nothing.
    local = sum(np.prod(x.sharding.shard_shape(x.shape)) * 4 for x in frozen.values())
    assert prepared.memory.weights == pytest.approx(local / 2**30)
    assert prepared.memory.temporary > 0


def test_a_peak_that_an_earlier_measurement_made_is_not_taken_for_its_own(monkeypatch):
    model, peaks = tiny_model(), iter([3, 7, 7, 7])  # before and after each measurement, GiB
    monkeypatch.setattr(bench, "_peak_bytes", lambda device: next(peaks) * 2**30)
    prepared = prepare(model.config, model.wide, tiny_config(), dtype="float32")
    found = []
    for _ in range(2):
        state, frozen = start(prepared)
        found.append(measure(prepared, state, frozen, updates=1, warm_up=0)[0].peak_gib)
    assert found == [7, None]


def test_every_mesh_and_stage_draws_the_same_weights():
    model = tiny_model()
    drawn = []
    for stage, devices in ((1, 1), (2, 4)):
        config = tiny_config(fsdp=devices)
        prepared = prepare(model.config, model.wide, config, stage=stage, dtype="float32")
        state, frozen = start(prepared)
        drawn.append(state.trainable | frozen)
    one, two = drawn
    assert set(one) < set(two)  # stage 2 has LoRA factors too
    for name, value in one.items():
        assert np.array_equal(value, two[name]), name
    assert all(not np.any(x) for name, x in two.items() if name.endswith("lora_B"))


def test_bench_train_records_every_combination(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny_model().config)
    file = tmp_path / "train.jsonl"
    main(
        Args(
            shape="tiny",
            stage=(1,),
            sequences=(1, 2),
            sequence_length=16,
            attention=("mask",),
            ffn_group_size=16,
            dtype="float32",
            updates=1,
            warm_up=0,
            json=file,
        )
    )
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["sequences_per_update"] for record in records] == [1, 2]
    assert all(record["suite"] == "train" and len(record["losses"]) == 1 for record in records)
    assert capsys.readouterr().out.count("GiB a device: weights") == 2


def test_a_row_that_cannot_run_says_why_and_nothing_measured_is_an_error(monkeypatch, tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("cudnn attention runs here")
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny_model().config)
    with pytest.raises((RuntimeError, ValueError), match=r"cuDNN|cudnn|nothing could be measured"):
        main(Args(shape="tiny", stage=(1,), ffn_group_size=16, json=tmp_path / "train.jsonl"))
    assert not (tmp_path / "train.jsonl").exists()
    with pytest.raises(ValueError, match="unknown shape 'llama-9'; known: llama"):
        main(Args(shape="llama-9"))


def test_mfu_counts_stage_2s_adapters_too():
    model = tiny_model()
    one = step_flops_per_token(model.config, model.wide, 16)
    # r = 2: q 32+64, k and v 32+32, o 64+32, gate and up 32+128, down 128+32 (times 6 r)
    two = step_flops_per_token(model.config, model.wide, 16, lora_rank=2)
    assert two - one == 6 * 2 * (96 + 64 + 64 + 96 + 160 + 160 + 160)
