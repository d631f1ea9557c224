"""The comparison of one device with several says what agrees, and fails where it does not."""

import json

import pytest

from tests.train.tiny import tiny_model
from train import check_layouts
from train.check_layouts import Args, main
from wide_jax import shapes


@pytest.fixture
def args(monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny_model().config)
    return Args(
        shape="tiny", sequences=4, sequence_length=16, updates=4, ffn_group_size=16,
        attention="mask", dtype="float32", tolerance=1e-5, json=tmp_path / "train.jsonl",
    )  # fmt: skip


def test_two_devices_train_what_one_does_and_one_goes_on_from_their_checkpoint(args, capsys):
    main(args)
    one, two = [json.loads(line) for line in args.json.read_text().splitlines()]
    assert [record["mesh"]["fsdp"] for record in (one, two)] == [1, 2]
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert len(one["losses"]) == 4
    assert "restored on one device bit for bit" in capsys.readouterr().out


def test_a_difference_is_an_error(args, monkeypatch):
    draw = check_layouts.start

    def other_weights(prepared, **options):
        state, frozen = draw(prepared, **options)
        if prepared.config.fsdp > 1:
            frozen["model.norm.weight"] = frozen["model.norm.weight"] * 1.5
        return state, frozen

    monkeypatch.setattr(check_layouts, "start", other_weights)
    with pytest.raises(RuntimeError, match=r"losses differ by .*, tolerance 1e-05"):
        main(args)
