"""The model families that can be read and written: one short file each, listed here."""

from wide_jax.hf.families import llama, mistral, qwen2, qwen3
from wide_jax.hf.families._family import ConfigError as ConfigError
from wide_jax.hf.families._family import Family as Family
from wide_jax.hf.families._family import Keys as Keys

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (llama, qwen2, qwen3, mistral)
}
