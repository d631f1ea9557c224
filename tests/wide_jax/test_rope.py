import math

import numpy as np
import pytest

from wide_jax.config import RopeConfig
from wide_jax.rope import attention_scaling, inverse_frequencies

LLAMA32 = RopeConfig(
    rope_type="llama3",
    rope_theta=5e5,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def plain(theta, head_dim):
    return 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)


def test_default_is_powers_of_theta():
    inv = inverse_frequencies(RopeConfig(rope_theta=1e5), 64)
    assert inv.dtype == np.float64
    assert inv.shape == (32,)
    np.testing.assert_allclose(inv, plain(1e5, 64), rtol=1e-12)


def test_case_A1_llama3_scaling_is_used_head_dim_64():
    inv, raw = inverse_frequencies(LLAMA32, 64), plain(5e5, 64)
    np.testing.assert_allclose(inv[:15], raw[:15], rtol=1e-12)
    np.testing.assert_allclose(inv[18:], raw[18:] / 32, rtol=1e-12)
    expected = {
        14: 3.2114e-3,
        15: 1.29055e-3,
        16: 4.29557e-4,
        17: 9.70829e-5,
        18: 1.94616e-5,
        31: 9.41831e-8,
    }
    for index, value in expected.items():
        assert inv[index] == pytest.approx(value, rel=2e-5), index


def test_case_A1_llama3_scaling_is_used_head_dim_128():
    rope = RopeConfig(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    inv, raw = inverse_frequencies(rope, 128), plain(5e5, 128)
    np.testing.assert_allclose(inv[:29], raw[:29], rtol=1e-12)
    assert inv[29] == pytest.approx(2.16657e-3, rel=2e-5)
    assert raw[29] == pytest.approx(2.61610e-3, rel=2e-5)
    assert inv[32] == pytest.approx(5.24846e-4, rel=2e-5)
    assert inv[63] == pytest.approx(3.06893e-7, rel=2e-5)


def test_case_A1_unknown_type_raises_with_its_name():
    rope = RopeConfig()
    object.__setattr__(rope, "rope_type", "longrope")  # past the tests' own type check
    with pytest.raises(ValueError, match="longrope"):
        inverse_frequencies(rope, 64)


def test_linear_divides_every_pair():
    rope = RopeConfig(rope_type="linear", factor=4.0)
    np.testing.assert_allclose(inverse_frequencies(rope, 32), plain(1e4, 32) / 4, rtol=1e-12)


def test_dynamic_is_plain_within_the_original_context_and_stretched_beyond():
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=100)
    for length in (None, 1, 100):
        np.testing.assert_allclose(
            inverse_frequencies(rope, 32, sequence_length=length), plain(1e4, 32), rtol=1e-12
        )
    longer = inverse_frequencies(rope, 32, sequence_length=250)
    np.testing.assert_allclose(longer, plain(1e4 * 4.0 ** (32 / 30), 32), rtol=1e-12)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    rope = RopeConfig(
        rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768
    )
    inv, raw = inverse_frequencies(rope, 128), plain(1e6, 128)
    turns = 32768 * raw / (2 * math.pi)
    np.testing.assert_allclose(inv[turns > 40], raw[turns > 40], rtol=1e-12)
    np.testing.assert_allclose(inv[turns < 0.8], raw[turns < 0.8] / 4, rtol=1e-12)
    assert np.all((inv <= raw * (1 + 1e-12)) & (inv >= raw / 4 * (1 - 1e-12)))
    assert attention_scaling(rope) == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_scaling_overrides():
    base = dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
    assert attention_scaling(RopeConfig(**base, attention_factor=1.25)) == 1.25
    both = RopeConfig(**base, mscale=0.707, mscale_all_dim=1.0)
    expected = (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert attention_scaling(both) == pytest.approx(expected)
    assert attention_scaling(RopeConfig(rope_type="yarn", factor=1.0)) == 1.0
    assert attention_scaling(LLAMA32) == 1.0


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        (RopeConfig(rope_type="llama3", factor=8.0), "low_freq_factor"),
        (RopeConfig(rope_type="yarn", factor=4.0), "original_max_position_embeddings"),
        (RopeConfig(rope_type="linear", factor=0.0), "factor"),
        (RopeConfig(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ],
)
def test_missing_or_unsupported_fields_are_named(rope, field):
    with pytest.raises(ValueError, match=field):
        inverse_frequencies(rope, 64)


@pytest.mark.parametrize("head_dim", [0, 7])
def test_odd_head_dim_is_refused(head_dim):
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        inverse_frequencies(RopeConfig(), head_dim)
