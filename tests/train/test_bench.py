"""The speed measurement runs the real step and fills a record."""

import pytest

from eval.records import COMMON, FIELDS, check_record, common_fields
from tests.train.tiny import tiny_config, tiny_model
from train.bench import measure, record_fields
from train.flops import step_flops_per_token


@pytest.mark.parametrize("stage", [1, 2])
def test_measuring_a_stage_gives_a_whole_record(stage):
    model = tiny_model()
    config = tiny_config(data_parallel=2, fsdp=2, tensor_parallel=2)
    seen = []
    timing = measure(
        model.config, model.wide, config, stage=stage, dtype="float32", updates=3, warm_up=1,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert len(timing.seconds) == 3
    assert len(timing.losses) == 5
    assert timing.tokens_per_second == pytest.approx(8 * 16 / sorted(timing.seconds)[1])
    assert timing.compile_seconds > max(timing.seconds)
    assert (timing.mfu, seen[-1]) == (None, (5, 5))  # a CPU's peak is not known
    fields = record_fields(timing, config, model="tiny", stage=stage, dtype="float32")
    record = common_fields("train", command="test") | fields
    check_record(record, "test")
    assert set(COMMON) | set(FIELDS["train"]) <= set(record)
    assert record["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}


def test_mfu_counts_stage_2s_adapters_too():
    model = tiny_model()
    one = step_flops_per_token(model.config, model.wide, 16)
    # r = 2: q 32+64, k and v 32+32, o 64+32, gate and up 32+128, down 128+32 (times 6 r)
    two = step_flops_per_token(model.config, model.wide, 16, lora_rank=2)
    assert two - one == 6 * 2 * (96 + 64 + 64 + 96 + 160 + 160 + 160)
