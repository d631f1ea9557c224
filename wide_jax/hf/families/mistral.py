"""Mistral: Llama without biases, with one sliding window on every layer (null: none)."""

from typing import Any

from wide_jax.config import ModelConfig
from wide_jax.hf.families._family import Family, Keys


def _read(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    if keys.take("sliding_window") is None:
        return {}
    return {"sliding_window": keys.size("sliding_window")}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
)
