"""`attention_step` in Triton: decode attention whose programs begin with it, no kernel in front."""

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._attention.config import AttentionConfig
from pallas_kernels.attention_decode.triton import NewTokens, split_and_merge
from pallas_kernels.rope_cache.rotation import Rotation


def attention_step(
    q: Float[Array, "B Hq d"],
    k: Float[Array, "B Hk d"],
    v: Float[Array, "B Hk d"],
    k_cache: Float[Array, "B S Hk d"],
    v_cache: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"],
    low: Int32[Array, " B"],
    high: Int32[Array, " B"],
    rotation: Rotation,
    k_norm: Float[Array, " d"] | None,
    scale: float,
    config: AttentionConfig | None,
) -> tuple[Float[Array, "B Hq d"], Float[Array, "B S Hk d"], Float[Array, "B S Hk d"]]:
    """See `reference.attention_step`. Raises `NotImplementedError` where no Triton kernel runs."""
    new = NewTokens(k, v, rotation, k_norm)
    return split_and_merge(
        "attention_step", q, k_cache, v_cache, mask, low, high, scale, config, new
    )
