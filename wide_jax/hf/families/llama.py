"""Llama 1, 2, 3, 3.1, 3.2 and what shares their class: SmolLM2, Yi, TinyLlama."""

from typing import Any

from wide_jax.config import ModelConfig
from wide_jax.hf.families._family import Family, Keys


def _read(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    keys.only("rope_interleaved", [False], "pairs are rotated in halves")
    keys.only("sliding_window", [], "transformers' Llama has none; is this a Mistral?")
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": keys.flag("mlp_bias")}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=_read,
    write=_write,
)
