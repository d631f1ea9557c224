"""The comparison of one device with several says what agrees, and fails where it does not."""

import dataclasses
import json

import jax
import numpy as np
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
        attention="mask", dtype="float32", json=tmp_path / "train.jsonl",
    )  # fmt: skip


def records(args):
    return [json.loads(line) for line in args.json.read_text().splitlines()]


def test_two_devices_train_what_one_does_and_one_goes_on_from_their_checkpoint(args, capsys):
    main(args)
    two, one, after, control = records(args)
    assert [record["mesh"]["fsdp"] for record in (two, one, after, control)] == [2, 1, 1, 1]
    for what in ("losses", "gradient_norms"):
        assert len(one[what]) == 4
        assert two[what] == pytest.approx(one[what], rel=1e-5)
        assert control[what] == pytest.approx(one[what], rel=1e-5)
    assert len(set(one["losses"])) == 4  # every update sees rows of its own
    assert (after["restored_from"], len(after["losses"])) == (2, 1)
    compared = after["compared"]
    assert compared["restored_bit_for_bit"]
    assert compared["speedup"] == two["tokens_per_second"] / one["tokens_per_second"]
    differences = [abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True)]
    assert max(differences) <= compared["loss_largest"] < 1e-5  # the update after the restore too
    assert compared["loss"] <= compared["loss_largest"]
    assert "restored bit for bit: True" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float32", 24)])
def test_the_control_moves_every_embedding_weight_by_one_rounding(dtype, bits):
    x = jax.random.normal(jax.random.key(5), (64, 8)).astype(dtype)
    moved = np.asarray(check_layouts.neighbours(x), np.float64) / np.asarray(x, np.float64) - 1
    assert 2.0**-bits <= np.abs(moved).min() * 1.001
    assert np.abs(moved).max() <= 2.0 ** (1 - bits)
    assert 0.3 < (moved > 0).mean() < 0.7


def test_one_layout_alone_says_what_rounding_does(args):
    main(dataclasses.replace(args, fsdp=1))
    one, control = records(args)
    assert "compared" not in one
    assert control["control"] == "embedding moved by one rounding"


def test_a_difference_is_an_error_and_what_was_measured_is_kept(args, monkeypatch):
    draw = check_layouts.start

    def other_weights(prepared, **options):
        state, frozen = draw(prepared, **options)
        if prepared.config.fsdp > 1:
            frozen["model.norm.weight"] = frozen["model.norm.weight"] * 1.5
        return state, frozen

    monkeypatch.setattr(check_layouts, "start", other_weights)
    with pytest.raises(RuntimeError, match=r"losses differ by .*, rounding alone by \d"):
        main(args)
    assert len(records(args)) == 4
    assert records(args)[2]["compared"]["loss"] > 1e-5


def test_another_gradient_is_an_error_even_if_no_loss_shows_it(args, monkeypatch):
    measure = check_layouts.measure

    def halved(prepared, state, frozen, **options):
        timing, state = measure(prepared, state, frozen, **options)
        if prepared.config.fsdp > 1:
            norms = tuple(norm / 2 for norm in timing.gradient_norms)
            timing = dataclasses.replace(timing, gradient_norms=norms)
        return timing, state

    monkeypatch.setattr(check_layouts, "measure", halved)
    with pytest.raises(RuntimeError, match=r"^gradient norms differ by 0\.\d+, rounding alone by"):
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
    assert not records(args)[2]["compared"]["restored_bit_for_bit"]


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
