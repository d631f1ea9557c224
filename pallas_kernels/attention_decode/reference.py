"""The specification of `attention_decode`, and its CPU path."""

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention_prefill.reference import attention as prefill


def attention(
    q: Float[Array, "B Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"],
    low: Int32[Array, " B"],
    high: Int32[Array, " B"],
    scale: float,
) -> Float[Array, "B Hq d"]:
    """One query a row over slots `low[b] .. high[b]`: prefill's specification at T = 1."""
    return prefill(q[:, None], k, v, mask, low[:, None], high[:, None], scale)[:, 0]
