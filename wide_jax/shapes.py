"""Architectures by name, for benchmarks on random weights."""

from wide_jax.config import ModelConfig, RopeConfig

SHAPES = {
    "llama-3.1-8b": ModelConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            rope_type="llama3",
            rope_theta=500_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8_192,
        ),
    ),
    "smollm2-135m": ModelConfig(
        model_type="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8_192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_theta=100_000.0),
        tie_word_embeddings=True,
    ),
}


def shape(name: str) -> ModelConfig:
    """The architecture of that name.

    Raises:
        ValueError: no such name; the message lists those there are.
    """
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]
