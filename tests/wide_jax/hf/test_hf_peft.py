import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.wide_jax.hf.conftest import random_tensors
from wide_jax.hf.load import CheckpointError
from wide_jax.hf.peft import LoRA, MergeWarning, PeftError, merge, read_adapter, write_adapter

Q0, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture
def lora(config):
    shapes = {"qA": (8, 72), "qB": (144, 8), "dA": (8, 80), "dB": (72, 8)}
    f = random_tensors(shapes, seed=5)
    factors = {Q0: (f["qA"], f["qB"]), DOWN1: (f["dA"], f["dB"])}
    return LoRA(rank=8, alpha=32.0, factors=factors, dropout=0.1)


def test_case_C5_delta_of_known_factors():
    a = np.array([[1, 2], [3, 4]], np.float32)
    b = np.array([[0, 1], [0, 0]], np.float32)
    lora = LoRA(rank=2, alpha=8.0, factors={Q0: (a, b)})
    np.testing.assert_array_equal(lora.delta(Q0), [[12, 16], [0, 0]])


def test_case_C5_scales():
    assert LoRA(rank=8, alpha=32.0, factors={}).scale == 4.0
    stable = LoRA(rank=8, alpha=32.0, factors={}, rank_stabilised=True)
    assert stable.scale == pytest.approx(11.3137, rel=1e-5)


@pytest.mark.filterwarnings("ignore::wide_jax.hf.peft.MergeWarning")
def test_case_C5_merge_is_float32_by_default_also_on_a_bfloat16_base(config, weights, lora):
    half = {name: jnp.asarray(array, jnp.bfloat16) for name, array in weights.items()}
    merged = merge(half, lora, config)
    assert set(merged) == set(weights)
    for name, tensor in merged.items():
        expected = np.asarray(half[name], np.float32)
        if name == f"{Q0}.weight":
            a, b = lora.factors[Q0]
            expected = expected + 4 * (b @ a)
        if name == f"{DOWN1}.weight":
            a, b = lora.factors[DOWN1]
            expected = expected + 4 * (b @ a)
        found = np.asarray(tensor)
        assert found.dtype == tensor.dtype == np.float32
        assert tuple(tensor.shape) == found.shape
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_case_C5_rounding_away_the_delta_is_said(config, weights):
    weights[f"{Q0}.weight"] = np.ones((144, 72), np.float32)
    a, b = np.full((1, 72), 0.003, np.float32), np.ones((144, 1), np.float32)
    lora = LoRA(rank=1, alpha=1.0, factors={Q0: (a, b)})
    with pytest.warns(MergeWarning, match="dense mode too"):
        merged = merge(weights, lora, config, dtype="bfloat16")
    with pytest.warns(MergeWarning, match=r"bfloat16 loses 100\.0% of the adapter"):
        found = np.asarray(merged[f"{Q0}.weight"])
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), 1.0)


def test_case_C5_peft_keys_and_files(tmp_path, config, lora):
    write_adapter(tmp_path, lora, config, base="owner/base")
    stored = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert set(stored) == {
        f"base_model.model.{module}.lora_{factor}.weight"
        for module in (Q0, DOWN1)
        for factor in "AB"
    }
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["peft_type"] == "LORA"
    assert (raw["r"], raw["lora_alpha"], raw["use_rslora"]) == (8, 32.0, False)
    assert raw["target_modules"] == ["down_proj", "q_proj"]
    again = read_adapter(tmp_path, config)
    assert (again.rank, again.alpha, again.dropout) == (8, 32.0, 0.1)
    for module, pair in lora.factors.items():
        for found, wanted in zip(again.factors[module], pair, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_factors_of_wrong_shape_or_place_are_reported_together(config):
    a, b = np.zeros((2, 72), np.float32), np.zeros((144, 2), np.float32)
    factors = {Q0: (b, a), "model.layers.9.mlp.up_proj": (a, b), "model.norm": (a, b)}
    with pytest.raises(CheckpointError) as caught:
        LoRA(rank=2, alpha=1.0, factors=factors).check(config)
    assert len(caught.value.problems) == 3
    assert "A [144, 2] and B [2, 72], expected [2, 72] and [144, 2]" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("peft_type", "IA3"),
        ("fan_in_fan_out", True),
    ],
)
def test_adapter_features_that_change_the_arithmetic_are_refused(
    tmp_path, config, lora, key, value
):
    write_adapter(tmp_path, lora, config, base=None)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(PeftError, match=key):
        read_adapter(tmp_path, config)


def test_keys_that_are_no_factor_pairs_are_refused(tmp_path, config, lora):
    write_adapter(tmp_path, lora, config, base=None)
    path = tmp_path / "adapter_model.safetensors"
    stored = safetensors.numpy.load_file(path)
    del stored[f"base_model.model.{Q0}.lora_B.weight"]
    stored["base_model.model.lm_head.weight"] = np.zeros((2, 2), np.float32)
    safetensors.numpy.save_file(stored, path)
    with pytest.raises(PeftError) as caught:
        read_adapter(tmp_path, config)
    assert "lm_head.weight is not a LoRA factor" in str(caught.value)
    assert f"{Q0} lacks lora_A or lora_B" in str(caught.value)
