"""`attention_decode` by cuDNN, then zeros where the mask is off."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention(
    q: Float[Array, "B Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"] | None,
    lengths: Int[Array, " B"],
    scale: float,
    *,
    plain: bool,
    op: str = "attention_decode",
) -> Float[Array, "B Hq d"]:
    """See `reference.attention`. Rows from slot 0 without a window (`plain`), bfloat16 or float16.

    Raises `NotImplementedError`, in the name of `op`, on others.

    cuDNN reads all slots below each row's length rounded up to its own tiles: those must be
    finite, as they are in a cache that began as zeros.
    """
    if not plain:
        raise NotImplementedError(
            f"{op}: dense (cuDNN) takes neither first nor sliding_window; use "
            "implementation='triton'"
        )
    if q.dtype == jnp.float32:
        raise NotImplementedError(
            f"{op}: dense (cuDNN) takes bfloat16 and float16, not float32; use "
            "implementation='triton'"
        )
    out = jax.nn.dot_product_attention(
        q[:, None],
        k,
        v,
        scale=scale,
        query_seq_lengths=jnp.minimum(lengths, 1),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )[:, 0]
    on = jnp.broadcast_to((lengths > 0)[:, None, None], out.shape)
    if mask is not None:
        on &= jnp.repeat(mask, q.shape[1] // mask.shape[1], axis=1)[..., None]
    return jnp.where(on, out, 0)
