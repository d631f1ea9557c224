"""Weights to measure with: one rule for every benchmark, the same values on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wide_jax import partition
from wide_jax.random_weights import random_weight

KEY = jax.random.key(7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.0.input_layernorm.weight", 1.0),
        ("model.layers.0.self_attn.q_norm.weight", 1.0),
        ("model.layers.0.mlp.up_proj.lora.lora_B", 0.0),
    ],
)
def test_norms_are_one_and_a_new_lora_changes_nothing(name, value):
    found = random_weight(name, (6,), jnp.float32, KEY)
    assert (found.dtype, found.tolist()) == (jnp.float32, [value] * 6)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "router.bias", "q_proj.lora.lora_A"])
def test_everything_else_is_normal_and_its_type_changes_only_the_rounding(name):
    narrow = random_weight(name, (300, 40), "bfloat16", KEY)
    wide = random_weight(name, (300, 40), "float32", KEY)
    assert np.asarray(narrow, np.float32) == pytest.approx(np.asarray(wide), rel=2**-7)
    assert np.std(wide) == pytest.approx(0.02, rel=0.02)
    assert abs(np.mean(wide)) < 1e-3
    assert not np.array_equal(wide, random_weight(name, (300, 40), "float32", jax.random.key(8)))


def test_a_weight_is_drawn_on_its_shards():
    mesh = partition.make_mesh(fsdp=4, tensor=2)
    name, shape = "model.layers.1.self_attn.q_proj.weight", (16, 32)
    sharding = partition.sharding_for(name, shape, mesh)
    split = random_weight(name, shape, jnp.bfloat16, KEY, sharding=sharding)
    assert split.sharding == sharding
    assert np.array_equal(split, random_weight(name, shape, jnp.bfloat16, KEY))
