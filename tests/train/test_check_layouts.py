"""The comparison of one device with several says what agrees, and fails where it does not."""

import dataclasses
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


def records(args):
    return [json.loads(line) for line in args.json.read_text().splitlines()]


def test_two_devices_train_what_one_does_and_one_goes_on_from_their_checkpoint(args, capsys):
    main(args)
    two, one, after = records(args)
    assert [record["mesh"]["fsdp"] for record in (two, one, after)] == [2, 1, 1]
    for what in ("losses", "gradient_norms"):
        assert len(one[what]) == 4
        assert two[what] == pytest.approx(one[what], rel=1e-5)
    assert len(set(one["losses"])) == 4  # every update sees rows of its own
    assert (after["restored_from"], len(after["losses"])) == (2, 1)
    compared = after["compared"]
    assert compared["restored_bit_for_bit"]
    assert compared["speedup"] == two["tokens_per_second"] / one["tokens_per_second"]
    largest = max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True))
    assert compared["losses"] == pytest.approx(largest)
    assert max(compared["next_loss"], compared["next_gradient_norm"]) < 1e-5
    assert "restored on one device bit for bit" in capsys.readouterr().out


def test_a_difference_is_an_error_and_what_was_measured_is_kept(args, monkeypatch):
    draw = check_layouts.start

    def other_weights(prepared, **options):
        state, frozen = draw(prepared, **options)
        if prepared.config.fsdp > 1:
            frozen["model.norm.weight"] = frozen["model.norm.weight"] * 1.5
        return state, frozen

    monkeypatch.setattr(check_layouts, "start", other_weights)
    with pytest.raises(RuntimeError, match=r"losses differ by .*, tolerance 1e-05"):
        main(args)
    assert records(args)[-1]["compared"]["losses"] > 1e-5


def test_another_gradient_is_an_error_even_if_no_loss_shows_it(args, monkeypatch):
    measure = check_layouts.measure

    def halved(prepared, state, frozen, **options):
        timing, state = measure(prepared, state, frozen, **options)
        if prepared.config.fsdp > 1:
            norms = tuple(norm / 2 for norm in timing.gradient_norms)
            timing = dataclasses.replace(timing, gradient_norms=norms)
        return timing, state

    monkeypatch.setattr(check_layouts, "measure", halved)
    with pytest.raises(RuntimeError, match=r"^gradient norms differ by 0\.5, tolerance 0\.05$"):
        main(args)


def test_a_checkpoint_that_comes_back_different_is_an_error(args, monkeypatch):
    restore = check_layouts.Checkpoints.restore

    def changed(self, like):
        state = restore(self, like)
        name = min(state.trainable)
        return dataclasses.replace(
            state, trainable=state.trainable | {name: state.trainable[name] + 1e-7}
        )

    monkeypatch.setattr(check_layouts.Checkpoints, "restore", changed)
    with pytest.raises(RuntimeError, match="restored arrays are not those that were written"):
        main(args)
    assert not records(args)[-1]["compared"]["restored_bit_for_bit"]


def test_what_was_measured_before_a_run_broke_is_kept(args, monkeypatch):
    draw = check_layouts.start

    def out_of_memory(prepared, **options):
        if prepared.config.fsdp == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return draw(prepared, **options)

    monkeypatch.setattr(check_layouts, "start", out_of_memory)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        main(args)
    assert [record["mesh"]["fsdp"] for record in records(args)] == [2]
