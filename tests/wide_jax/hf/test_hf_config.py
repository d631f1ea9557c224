import dataclasses
import json

import pytest

from wide_jax.config import ModelConfig, RopeConfig
from wide_jax.hf.config import (
    ConfigError,
    config_from_hf,
    config_to_hf,
    read_config,
    stop_token_ids,
)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 32}
LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_smollm2_as_published():
    config = config_from_hf(SMOLLM2)
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_theta=1e5),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING}},
        {
            "rope_theta": 5e5,
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING},
        },
    ],
    ids=["4.57", "4.57-type", "5.x", "both"],
)
def test_case_A1_every_spelling_of_llama3_rope(rope):
    assert config_from_hf(LLAMA | rope).rope == RopeConfig(
        rope_type="llama3", rope_theta=5e5, **LLAMA3_SCALING
    )


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_case_A1_unknown_rope_type_raises_with_its_name(key):
    with pytest.raises(ConfigError, match="longrope"):
        config_from_hf(LLAMA | {"rope_scaling": {key: "longrope", "short_factor": [1.0]}})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear"}, "lacks factor for rope_type='linear'"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 1.0}, "must exceed"),
        ({"type": "dynamic", "factor": 0}, "needs a positive factor"),
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, "disagree"),
        ({"full_attention": {"rope_type": "default"}}, "one flat object"),
    ],
)
def test_incomplete_rope_is_refused_not_left_unscaled(scaling, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(LLAMA | {"rope_scaling": scaling})


def test_yarn_factor_may_follow_from_the_contexts():
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    config = config_from_hf(LLAMA | {"rope_scaling": scaling, "max_position_embeddings": 4096})
    assert config.rope.factor == 4.0


def test_theta_of_5x_is_not_replaced_by_the_default():
    new = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert config_from_hf(new).rope == RopeConfig(rope_theta=1e6)
    assert config_from_hf(LLAMA).rope.rope_theta == 1e4
    with pytest.raises(ConfigError, match=r"rope_theta.*disagree"):
        config_from_hf(new | {"rope_theta": 5e5})


def test_dtype_in_both_spellings():
    assert config_from_hf(LLAMA | {"dtype": "bfloat16"}).dtype == "bfloat16"
    assert config_from_hf(LLAMA | {"torch_dtype": "float16"}).dtype == "float16"
    assert config_from_hf(LLAMA).dtype == "float32"
    with pytest.raises(ConfigError, match="int8"):
        config_from_hf(LLAMA | {"dtype": "int8"})


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_case_A3_llama_without_head_dim_has_hidden_over_heads(absent):
    assert config_from_hf(LLAMA | absent).head_dim == 16


def test_case_A3_qwen3_head_dim_is_taken_from_the_config():
    config = config_from_hf(QWEN3)
    assert (config.head_dim, config.qk_norm, config.qkv_bias) == (32, True, False)
    real = QWEN3 | {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert config_from_hf(real).head_dim == 128


def test_case_A6_bias_flags():
    config = config_from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    config = config_from_hf(LLAMA)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)
    config = config_from_hf(QWEN2)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    config = config_from_hf(QWEN3 | {"attention_bias": True})
    assert (config.qkv_bias, config.o_bias) == (True, True)


@pytest.mark.parametrize("base", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_sliding_window_of_qwen(base):
    off = base | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
    assert config_from_hf(off).sliding_window is None
    upper = config_from_hf(off | {"use_sliding_window": True})
    assert [upper.window_of_layer(i) for i in range(3)] == [None, 8, 8]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    listed = config_from_hf(off | {"use_sliding_window": True, "layer_types": types})
    assert [listed.window_of_layer(i) for i in range(3)] == [8, None, 8]
    with pytest.raises(ConfigError, match="use_sliding_window=False"):
        config_from_hf(off | {"layer_types": types})
    with pytest.raises(ConfigError, match="chunked_attention"):
        config_from_hf(off | {"layer_types": ["chunked_attention"] * 3})
    with pytest.raises(ConfigError, match="2 entries for 3 layers"):
        config_from_hf(off | {"layer_types": ["full_attention"] * 2})


def test_sliding_window_of_mistral():
    mistral = LLAMA | {"model_type": "mistral"}
    assert config_from_hf(mistral).window_of_layer(0) == 4096
    assert config_from_hf(mistral | {"sliding_window": None}).window_of_layer(0) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attn_logit_softcapping", 50.0),
        ("num_experts", 8),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("sliding_window", 4096),
        ("layer_types", ["sliding_attention"] * 3),
        ("residual_multiplier", 0.22),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "mrope_section": [4, 4]}),
        ("use_qk_norm", True),
    ],
)
def test_unknown_features_are_refused_by_name_and_value(key, value):
    with pytest.raises(ConfigError) as caught:
        config_from_hf(LLAMA | {key: value})
    shown = "mrope_section" if key == "rope_scaling" else key
    assert shown in str(caught.value)


def test_harmless_and_ignored_keys_pass():
    harmless = {
        "_name_or_path": "x",
        "use_cache": False,
        "temperature": 0.6,
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
        "layer_types": ["full_attention"] * 3,
        "use_qk_norm": False,
    }
    assert config_from_hf(LLAMA | harmless) == config_from_hf(LLAMA)
    noted = LLAMA | {"my_note": "hello"}
    with pytest.raises(ConfigError, match=r"my_note='hello'.*ignore_keys"):
        config_from_hf(noted)
    assert config_from_hf(noted, ignore_keys=["my_note"]) == config_from_hf(LLAMA)


def test_all_problems_are_reported_together():
    raw = dict(LLAMA, hidden_act="relu", vocab_size=None, foo=1, rms_norm_eps=0)
    with pytest.raises(ConfigError) as caught:
        config_from_hf(raw)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="model_type='gemma'"):
        config_from_hf({"model_type": "gemma"})
    with pytest.raises(ConfigError, match="num_attention_heads=4 must be a multiple"):
        config_from_hf(LLAMA | {"num_key_value_heads": 3})


def test_token_ids_of_any_form():
    ids = {"bos_token_id": 1, "eos_token_id": [7, 8], "pad_token_id": -1}
    config = config_from_hf(LLAMA | ids)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (7, 8), None)
    assert config_from_hf(LLAMA | {"eos_token_id": None}).eos_token_ids == ()
    with pytest.raises(ConfigError, match="eos_token_id='x'"):
        config_from_hf(LLAMA | {"eos_token_id": "x"})


def test_stop_ids_come_from_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = read_config(tmp_path)
    assert stop_token_ids(tmp_path, config) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert stop_token_ids(tmp_path, config) == (5, 2)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        read_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        SMOLLM2,
        LLAMA | {"attention_bias": True, "mlp_bias": True, "eos_token_id": [1, 2]},
        LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        QWEN2
        | {
            "rope_theta": 1e6,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        QWEN3 | {"attention_bias": True, "tie_word_embeddings": True},
        LLAMA | {"model_type": "mistral", "sliding_window": 16},
    ],
)
def test_written_config_reads_back_equal(raw):
    config = config_from_hf(raw)
    written = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(written) == config


def test_what_hf_cannot_express_is_refused():
    config = config_from_hf(LLAMA)
    with pytest.raises(ValueError, match="qk_norm=True"):
        config_to_hf(dataclasses.replace(config, qk_norm=True))
    with pytest.raises(ValueError, match="o_bias"):
        config_to_hf(dataclasses.replace(config, qkv_bias=True, o_bias=False))
    with pytest.raises(ValueError, match="model_type='gpt'"):
        config_to_hf(dataclasses.replace(config, model_type="gpt"))
