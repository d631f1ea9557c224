"""Qwen3 (dense): RMS norm of each q and k head before RoPE, head_dim free of hidden_size."""

from typing import Any

from wide_jax.config import ModelConfig
from wide_jax.hf.families._family import Family, Keys, read_layer_windows, write_layer_windows


def _read(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, **read_layer_windows(keys, fields)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, **write_layer_windows(config)}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,  # not hidden / heads, unlike the other families
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=_read,
    write=_write,
)
