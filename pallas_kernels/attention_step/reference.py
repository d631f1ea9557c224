"""The specification of `attention_step`, and its CPU path: the two operations it stands for."""

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention_decode.reference import attention
from pallas_kernels.rope_cache.reference import rope_cache, rotated
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
) -> tuple[Float[Array, "B Hq d"], Float[Array, "B S Hk d"], Float[Array, "B S Hk d"]]:
    """A row's new token goes to slot `high[b]`, -1 for none, and sees slots `low[b] .. high[b]`."""
    cos, sin, eps = rotation.cos, rotation.sin, rotation.eps
    q = rotated(q[:, None], cos, sin, rotation.norm, eps)[:, 0]
    _, _, k_cache, v_cache = rope_cache(
        None, k[:, None], v[:, None], cos, sin, k_cache, v_cache, high[:, None], None, k_norm, eps
    )
    return attention(q, k_cache, v_cache, mask, low, high, scale), k_cache, v_cache
