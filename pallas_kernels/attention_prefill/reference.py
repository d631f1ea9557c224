"""The specification of `attention_prefill`, and its CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def attention(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    mask: Bool[Array, "M Ga"],
    low: Int32[Array, "B T"],
    high: Int32[Array, "B T"],
    scale: float,
) -> Float[Array, "B T Hq d"]:
    """Softmax attention of query (b, t) over slots `low[b, t] .. high[b, t]`; 0 for no slots.

    Query head h reads kv head `h // (Hq / Hk)`; group g of the mask is heads `g Hq / Ga ...`.
    Everything is float32 at highest precision; the result has q's dtype. Slots that no query of
    the row sees may hold anything.
    """
    b, t, hq, d = q.shape
    s, hk = k.shape[1], k.shape[2]
    highest = jax.lax.Precision.HIGHEST
    slot = jnp.arange(s, dtype=jnp.int32)
    visible = (slot >= low[..., None]) & (slot <= high[..., None])  # [B, T, S]
    seen = visible.any(axis=1)[:, :, None, None]
    k, v = (jnp.where(seen, x.astype(jnp.float32), 0.0) for x in (k, v))
    on = jnp.repeat(mask.reshape(b, t, -1), hq // mask.shape[1], axis=-1)[..., None]
    heads = jnp.where(on, q.astype(jnp.float32), 0.0).reshape(b, t, hk, hq // hk, d)
    logits = jnp.einsum("bthrd,bshd->bhrts", heads, k, precision=highest) * scale
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
    peak = jnp.maximum(logits.max(axis=-1, keepdims=True, initial=-jnp.inf), -1e30)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bhrts,bshd->bthrd", weights, v, precision=highest)
    return jnp.where(on, out.reshape(b, t, hq, d), 0.0).astype(q.dtype)
