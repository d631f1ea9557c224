"""Tiny models shared by the model's tests."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from wide_jax.batch import TokenBatch
from wide_jax.config import ModelConfig, RopeConfig, WideConfig
from wide_jax.model import WideForCausalLM
from wide_jax.routing import Routing


def tiny_config(**changes) -> ModelConfig:
    """Sizes that catch mix-ups: heads 6/2, head_dim not D/Hq, F no multiple of 128."""
    sizes = {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 40,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope": RopeConfig(rope_theta=1e4),
        "eos_token_ids": (2,),
        "pad_token_id": 2,
    }
    return ModelConfig(**{**sizes, **changes})


def tiny_model(wide: WideConfig | None = None, seed: int = 0, **changes) -> WideForCausalLM:
    """Random weights of a size that makes logits differ clearly between tokens."""
    model = WideForCausalLM(tiny_config(**changes), wide, rngs=nnx.Rngs(seed))
    state = nnx.state(model, nnx.Param)

    def widen(leaf):
        return leaf * 10.0 if leaf.ndim == 2 and leaf.shape[0] != 32 else leaf

    flat = nnx.to_flat_state(state)
    for path, variable in flat:
        if "router" not in ".".join(map(str, path)):
            variable[...] = widen(jnp.asarray(variable[...]))
    return model


@functools.partial(jax.jit, static_argnames="graphdef")
def _forward(graphdef, state, batch, routing, cache):
    model = nnx.merge(graphdef, state)
    output = model(batch, routing, cache=cache)
    return model.logits(output.hidden), output


def forward(model: WideForCausalLM, batch: TokenBatch, routing: Routing, cache=None):
    """Logits and the model's output, compiled: much faster than op by op."""
    return _forward(*nnx.split(model), batch, routing, cache)


@pytest.fixture(scope="session")
def wide_model() -> WideForCausalLM:
    config = tiny_config()
    return tiny_model(WideConfig.for_model(config, ffn_group_size=8))


@pytest.fixture(scope="session")
def dense_model() -> WideForCausalLM:
    return tiny_model()
