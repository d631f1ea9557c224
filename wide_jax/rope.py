"""Rotary position embedding: inverse frequencies of every scaling type that Llama and Qwen use.

Pair `i` of a head (elements `i` and `i + d/2`, Hugging Face's rotate-half layout) is turned by
`position * inv_freq[i]` radians, and cos and sin are multiplied by `attention_scaling`.
Angles must be computed in float32 or better: bfloat16 holds no position above 256 exactly.

The formulas are those of `transformers.modeling_rope_utils` (5.x), restated in float64 numpy.
"""

import math

import numpy as np

from wide_jax.config import RopeConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, *, sequence_length: int | None = None
) -> np.ndarray:
    """Radians per position of each pair of a head, float64 `[head_dim / 2]`.

    Args:
        rope: Scaling type and its fields.
        head_dim: Elements of one head, `d`; even.
        sequence_length: Tokens of the longest sequence. Only `dynamic` depends on it; None or a
            length within the original context leaves `dynamic` unscaled.

    Raises:
        ValueError: an unknown `rope_type`, or a field that the type needs is missing.
    """
    if rope.rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type={rope.rope_type!r} is not supported; known types: {', '.join(ROPE_TYPES)}"
        )
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"{head_dim=} must be even and at least 2: rotary embeddings turn pairs")
    if rope.partial_rotary_factor != 1.0:
        raise ValueError(
            f"partial_rotary_factor={rope.partial_rotary_factor} is not supported; expected 1.0 "
            "(Llama and Qwen2/3 turn every pair)"
        )
    match rope.rope_type:
        case "linear":
            return _plain(rope.rope_theta, head_dim) / _positive(rope, "factor")
        case "dynamic":
            return _dynamic(rope, head_dim, sequence_length)
        case "llama3":
            return _llama3(rope, head_dim)
        case "yarn":
            return _yarn(rope, head_dim)
        case _:
            return _plain(rope.rope_theta, head_dim)


def attention_scaling(rope: RopeConfig) -> float:
    """Factor on cos and sin; 1.0 for every type but `yarn`.

    YaRN (arXiv 2309.00071, eq. 22) scales the softmax logits by `m^2`, here by `m` on both q and k:
    `m(s, c) = 0.1 c ln s + 1`. `attention_factor` in the config overrides it; with `mscale` and
    `mscale_all_dim` both set (DeepSeek's variant) it is `m(s, mscale) / m(s, mscale_all_dim)`.
    """
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    factor = _positive(rope, "factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _plain(theta: float, head_dim: int) -> np.ndarray:
    """`theta ** (-2i/d)` (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, sequence_length: int | None) -> np.ndarray:
    """NTK-aware scaling of theta that grows with the sequence, as `transformers` has it.

    `theta * (f n / n0 - (f - 1)) ** (d / (d - 2))` with `n = max(sequence_length, n0)`.
    """
    if head_dim == 2:
        raise ValueError("dynamic RoPE needs head_dim > 2: its exponent is d / (d - 2)")
    factor, context = _positive(rope, "factor"), _positive(rope, "original_max_position_embeddings")
    length = max(sequence_length or 0, context)
    stretch = factor * length / context - (factor - 1)
    return _plain(rope.rope_theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Three bands by wavelength (Llama 3.1's `apply_scaling`, `transformers` "llama3").

    With `n0` the original context, wavelengths shorter than `n0 / high_freq_factor` stay, longer
    than `n0 / low_freq_factor` are divided by `factor`, and those between are blended linearly in
    `n0 / wavelength`.
    """
    factor = _positive(rope, "factor")
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    context = _positive(rope, "original_max_position_embeddings")
    if high <= low:
        raise ValueError(f"llama3 RoPE: high_freq_factor={high} must exceed low_freq_factor={low}")
    plain = _plain(rope.rope_theta, head_dim)
    turns = context * plain / (2 * math.pi)  # full turns within the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / factor


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """NTK-by-parts interpolation (YaRN, arXiv 2309.00071, section 3.2).

    Pairs that make more than `beta_fast` (default 32) turns within the original context stay, those
    below `beta_slow` (default 1) turns are divided by `factor`; a linear ramp over the pair index
    between them, its ends rounded outwards where `truncate`.
    """
    factor = _positive(rope, "factor")
    context = _positive(rope, "original_max_position_embeddings")
    theta = rope.rope_theta

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(rope.beta_fast or 32.0), pair_with_turns(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    plain = _plain(theta, head_dim)
    divide = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain * (1 - divide) + plain / factor * divide


def _positive(rope: RopeConfig, field: str) -> float:
    """The field's value; ValueError when it is missing or not above zero."""
    value = getattr(rope, field)
    if value is None or not value > 0:
        raise ValueError(f"rope_type={rope.rope_type!r} needs a positive {field}, got {value}")
    return float(value)
