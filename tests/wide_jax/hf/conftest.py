import json

import numpy as np
import pytest
import safetensors.numpy

from wide_jax.config import ModelConfig, WideConfig
from wide_jax.hf.config import config_to_hf
from wide_jax.hf.mapping import expected_router_tensors, expected_tensors


def random_tensors(shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.05, shape).astype(dtype) + (1 if "norm" in name else 0)
        for name, shape in shapes.items()
    }


@pytest.fixture
def config():
    """Shapes that catch mix-ups: heads 9/3, head_dim != D/Hq, F no multiple of 128."""
    return ModelConfig(
        model_type="llama",
        vocab_size=96,
        hidden_size=72,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.fixture
def wide(config):
    return WideConfig.for_model(config, ffn_group_size=16, router_rank=4)


@pytest.fixture
def weights(config):
    return random_tensors(expected_tensors(config))


@pytest.fixture
def routers(config, wide):
    return random_tensors(expected_router_tensors(config, wide), seed=1)


@pytest.fixture
def folder(tmp_path, config, weights):
    """A Hugging Face folder written with the safetensors library, not with ours."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
