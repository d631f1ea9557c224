"""`attention_prefill` by cuDNN's causal flash attention, then zeros where the mask is off."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._common.masking import clear_skipped


def attention(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B T Hk d"],
    v: Float[Array, "B T Hk d"],
    mask: Bool[Array, "M Ga"] | None,
    lengths: Int[Array, " B"] | None,
    sliding_window: int | None,
    scale: float,
    *,
    plain: bool,
) -> Float[Array, "B T Hq d"]:
    """See `reference.attention`. Only whole rows from slot 0 (`plain`), in bfloat16 or float16.

    cuDNN would need a mask of T x S for anything else.
    """
    if not plain:
        raise NotImplementedError(
            "attention_prefill: dense (cuDNN) takes whole rows from slot 0, without start, first "
            "or segment_ids; use implementation='triton'"
        )
    if q.dtype == jnp.float32:
        raise NotImplementedError(
            "attention_prefill: dense (cuDNN) takes bfloat16 and float16, not float32; use "
            "implementation='triton'"
        )
    b, t, hq, d = q.shape
    if lengths is not None:
        # cuDNN reads padded values; a weight of 0 does not make a NaN harmless.
        real = (jnp.arange(t) < lengths[:, None])[:, :, None, None]
        k, v = jnp.where(real, k, 0), jnp.where(real, v, 0)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if sliding_window is None else (sliding_window - 1, 0),
        implementation="cudnn",
    )
    if lengths is not None:
        out = jnp.where((jnp.arange(t) < lengths[:, None])[:, :, None, None], out, 0)
    if mask is None:
        return out
    flat = clear_skipped(out.reshape(b * t, hq * d), mask, hq // mask.shape[1] * d)
    return flat.reshape(q.shape)
