"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers if asked for."""

from typing import Any

from wide_jax.config import ModelConfig
from wide_jax.hf.families._family import Family, Keys, read_layer_windows, write_layer_windows


def _read(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    keys.only("attention_bias", [True], "Qwen2 always has q, k and v biases")
    return {"qkv_bias": True, **read_layer_windows(keys, fields)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return write_layer_windows(config)


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=_read,
    write=_write,
)
