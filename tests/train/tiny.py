"""A tiny model, its text and its run: seconds to train, yet every kind of parameter is there."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.config import TrainConfig
from wide_jax.batch import TokenBatch
from wide_jax.config import ModelConfig, WideConfig
from wide_jax.model import WideForCausalLM

VOCAB = 64


def tiny_model(
    *,
    seed: int = 0,
    tied: bool = True,
    groups: int = 16,
    layers: int = 1,
    window=None,
    dtype=jnp.float32,
) -> WideForCausalLM:
    """Hidden 32, 8/4 heads of 8, FFN 128; one layer, as compiling is what tests wait for."""
    config = ModelConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        sliding_window=window,
    )
    wide = WideConfig.for_model(config, ffn_group_size=groups, router_rank=4)
    model = WideForCausalLM(config, wide, dtype=dtype, rngs=nnx.Rngs(seed))
    # Spread the logits: at 0.02 every token would be as likely as any other.
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: 5 * x if x.ndim == 2 else x, state))
    return model


def tiny_tokens(count: int = 4_000, seed: int = 0) -> np.ndarray:
    """Token ids with something to learn: each is the last plus a small random step."""
    steps = np.random.default_rng(seed).integers(1, 4, count)
    return (np.cumsum(steps) % VOCAB).astype(np.int32)


def tiny_config(**changes) -> TrainConfig:
    settings = {"updates": 8, "sequences_per_update": 8, "sequence_length": 16, "sparsity": 0.25}
    return TrainConfig(**{**settings, **changes})


def ragged_batch(rows: int = 8, length: int = 16, seed: int = 0) -> TokenBatch:
    """Rows of different real lengths (one of a single token), the rest padding."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)
    lengths = np.array([1 + (5 * row) % length for row in range(rows)], np.int32)
    return TokenBatch.from_lengths(jnp.asarray(ids), jnp.asarray(lengths))


def assert_params_close(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(
            np.asarray(actual[name]), np.asarray(expected[name]), err_msg=name, **tolerance
        )


def dot_shapes(jaxpr):
    """Result shapes of every matrix product in a jaxpr, inner ones included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from dot_shapes(inner)
