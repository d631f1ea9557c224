"""What a generation will need on the device, before anything is allocated."""

import dataclasses
import math
from collections.abc import Mapping

from pallas_kernels.norm_route.api import STEP_TOKENS
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.generate import padded_sizes
from wide_jax.hf.mapping import expected_router_tensors, expected_tensors

GIB = 2**30
COUNTER_BYTES = 4 * STEP_TOKENS  # of a layer's cache: see `wide_jax.cache.LayerCache`


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. Temporary ones are an estimate: XLA decides what lives at once."""

    weights: int
    routers: int
    cache: int
    temporary: int  # one layer's activations in a prefill piece, its masks, and last logits

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.routers + self.cache + self.temporary

    def line(self) -> str:
        """One line for people."""
        parts = {
            "weights": self.weights + self.routers,
            "cache": self.cache,
            "activations": self.temporary,
        }
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        return f"memory, about: {self.total / GIB:.2f} GiB ({listed})"


def estimate_memory(
    config: ModelConfig,
    wide: WideConfig | None,
    *,
    batch: int,
    piece: int,
    capacity: int,
    element_bytes: int,
) -> MemoryEstimate:
    """For `batch` rows of up to `capacity` cached tokens, prefilled `piece` tokens at a time.

    `element_bytes` is the size of a weight, an activation and a cached element.
    """
    layers = config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    routers = masks = 0
    if wide is not None:
        groups = wide.attn_groups(config) + wide.ffn_groups(config)
        routers = 4 * _elements(expected_router_tensors(config, wide))
        masks = layers * batch * piece * groups
    width = 4 * config.hidden_size + 2 * config.intermediate_size + 2 * queries + 2 * keys
    return MemoryEstimate(
        weights=element_bytes * _elements(expected_tensors(config)),
        routers=routers,
        cache=layers * (element_bytes * 2 * batch * capacity * keys + COUNTER_BYTES),
        temporary=element_bytes * batch * piece * width + masks + 4 * batch * config.vocab_size,
    )


def estimate_generation(
    config: ModelConfig,
    wide: WideConfig | None,
    *,
    batch: int,
    prompt: int,
    max_new_tokens: int,
    prefill_chunk: int | None,
    element_bytes: int,
) -> MemoryEstimate:
    """For `generate` on `batch` prompts of up to `prompt` tokens, as it pads them."""
    width, capacity = padded_sizes(prompt, max_new_tokens, prefill_chunk)
    return estimate_memory(
        config,
        wide,
        batch=batch,
        piece=prefill_chunk or width,
        capacity=capacity,
        element_bytes=element_bytes,
    )


def _elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
