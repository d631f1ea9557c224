import dataclasses

import pytest
from flax import nnx

from wide_jax.config import WideConfig
from wide_jax.hf.config import config_from_hf
from wide_jax.hf.mapping import (
    expected_router_tensors,
    expected_tensors,
    is_router,
    module_path,
    tensor_name,
)
from wide_jax.model import WideForCausalLM

TINY = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def test_case_A3_shapes_with_a_free_head_dim():
    shapes = expected_tensors(config_from_hf(TINY))
    prefix = "model.layers.1.self_attn."
    assert shapes[prefix + "q_proj.weight"] == (128, 64)
    assert shapes[prefix + "k_proj.weight"] == shapes[prefix + "v_proj.weight"] == (64, 64)
    assert shapes[prefix + "o_proj.weight"] == (64, 128)
    assert shapes[prefix + "q_norm.weight"] == shapes[prefix + "k_norm.weight"] == (32,)
    real = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    shapes = expected_tensors(config_from_hf(TINY | real))
    assert shapes[prefix + "q_proj.weight"] == (2048, 1024)
    assert shapes[prefix + "k_proj.weight"] == shapes[prefix + "v_proj.weight"] == (1024, 1024)
    assert shapes[prefix + "o_proj.weight"] == (1024, 2048)


def test_case_A6_a_bias_tensor_for_every_flag():
    raw = TINY | {"model_type": "llama"}
    without = set(expected_tensors(config_from_hf(raw)))
    attention = set(expected_tensors(config_from_hf(raw | {"attention_bias": True}))) - without
    mlp = set(expected_tensors(config_from_hf(raw | {"mlp_bias": True}))) - without
    assert {n.split(".")[-2] for n in attention} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {n.split(".")[-2] for n in mlp} == {"gate_proj", "up_proj", "down_proj"}
    assert all(n.endswith(".bias") for n in attention | mlp)
    qwen2 = set(expected_tensors(config_from_hf(raw | {"model_type": "qwen2"}))) - without
    assert {n.split(".")[-2] for n in qwen2} == {"q_proj", "k_proj", "v_proj"}


def test_tied_models_have_no_head():
    assert "lm_head.weight" in expected_tensors(config_from_hf(TINY))
    assert "lm_head.weight" not in expected_tensors(
        config_from_hf(TINY | {"tie_word_embeddings": True})
    )


def test_router_shapes():
    config = config_from_hf(TINY)
    wide = WideConfig.for_model(config, ffn_group_size=16, router_rank=8)
    shapes = expected_router_tensors(config, wide)
    prefix = "model.layers.0.router_"
    assert len(shapes) == 16
    assert shapes[prefix + "attention.compressor.weight"] == (8, 64)
    assert shapes[prefix + "attention.router.weight"] == (2 * 2, 8)
    assert shapes[prefix + "ffn.router.weight"] == (2 * 10, 8)
    assert shapes[prefix + "ffn.router.bias"] == (20,)
    with pytest.raises(ValueError, match="ffn_group_size=48"):
        expected_router_tensors(config, dataclasses.replace(wide, ffn_group_size=48))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "model_type": "llama"},
        {"model_type": "qwen2", "tie_word_embeddings": True},
    ],
)
def test_the_table_names_exactly_the_parameters_of_the_module(changes):
    config = config_from_hf(TINY | changes)
    wide = WideConfig.for_model(config, ffn_group_size=16, router_rank=8)
    model = nnx.eval_shape(lambda: WideForCausalLM(config, wide, rngs=nnx.Rngs(0)))
    found = {
        tensor_name(path): variable.shape
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    assert found == expected_tensors(config) | expected_router_tensors(config, wide)


def test_names_and_paths_are_inverse():
    config = config_from_hf(TINY | {"num_hidden_layers": 11})
    wide = WideConfig.for_model(config, ffn_group_size=16, router_rank=8)
    for name in expected_tensors(config) | expected_router_tensors(config, wide):
        assert tensor_name(module_path(name)) == name
    path = ("model", "layers", 10, "mlp", "up_proj", "weight")
    assert module_path("model.layers.10.mlp.up_proj.weight") == path
    assert is_router("model.layers.3.router_ffn.router.bias")
    assert not is_router("model.layers.3.mlp.up_proj.weight")


def test_an_attached_lora_is_named_with_what_to_do():
    with pytest.raises(KeyError, match="merge or detach the LoRA"):
        tensor_name(("model", "layers", 0, "mlp", "up_proj", "lora", "lora_A"))


@pytest.mark.parametrize("name", ["model.layers.x.mlp.up_proj.weight", "model.layers.01.input", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(KeyError):
        module_path(name)
