"""The public function of a decode step's attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._attention.checks import check_settings
from pallas_kernels._attention.config import AttentionConfig, AttentionImplementation
from pallas_kernels.attention_decode.api import decode_problem, decode_ranges
from pallas_kernels.dispatch import resolve
from pallas_kernels.rope_cache import Rotation, rope_cache


def attention_step(
    q: Float[Array, "B Hq d"],
    k: Float[Array, "B Hk d"],
    v: Float[Array, "B Hk d"],
    k_cache: Float[Array, "B S Hk d"],
    v_cache: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"] | None,
    lengths: Int[Array, " B"],
    rotation: Rotation,
    *,
    k_norm: Float[Array, " d"] | None = None,
    first: Int[Array, " B"] | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
    expected_sparsity: float | None = None,
    implementation: AttentionImplementation | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Float[Array, "B Hq d"], Float[Array, "B S Hk d"], Float[Array, "B S Hk d"]]:
    """`rope_cache` of one new token a row, then `attention_decode`: `triton` fuses them.

    Row b's token goes to slot `lengths[b] - 1`. A row where that is not in `[first[b], S)` has
    none: nothing of it is written, and its outputs are zeros. Keys and values are written whatever
    the mask says, and in place where XLA owns the cache's buffers.

    Args:
        q, k, v: projections of the new tokens, bfloat16, float16 or float32.
        k_cache, v_cache: rotated keys and values of the same dtype.
        mask: True = active; group g is heads `g Hq / Ga ...`. None: everything is on.
        lengths: slots of every row that hold tokens, the new one's included.
        rotation: angles of the new tokens, and the queries' norm: `cos` and `sin` are [B, 1, half].
        k_norm: weight of the keys' norm, where the queries have one, whose `eps` is theirs too.
        first, sliding_window, scale, expected_sparsity, config: as for `attention_decode`.
        implementation: `reference`; `dense`: `rope_cache`, then cuDNN; `triton`: runs or raises.
            None: what the table of this device says of `attention_decode`.

    Returns:
        The outputs, then keys and values with the new entries.

    Raises:
        ValueError: shapes, dtypes or names that do not fit, with the numbers.
        NotImplementedError: the named implementation cannot run this here; or the result of a
            kernel is being differentiated, or batched by `jax.vmap`.
    """
    op = "attention_step"
    problem = decode_problem(
        op,
        q,
        k_cache,
        v_cache,
        mask,
        lengths,
        first=first,
        sliding_window=sliding_window,
        expected_sparsity=expected_sparsity,
    )
    scale = check_settings(op, sliding_window, scale, problem.d)
    rotation.check(op, problem.b, 1, problem.d)
    _check_new(op, k, v, rotation, k_norm, k_cache)
    if 0 in (problem.b, problem.s):
        return jnp.zeros(q.shape, q.dtype), k_cache, v_cache
    chosen, config = resolve(problem, implementation, config)
    low, high = decode_ranges(problem.s, lengths, first, sliding_window)
    if chosen == "dense":
        from pallas_kernels.attention_decode.dense import attention as dense

        rotated, _, k_cache, v_cache = rope_cache(
            q[:, None],
            k[:, None],
            v[:, None],
            rotation.cos,
            rotation.sin,
            k_cache,
            v_cache,
            high[:, None],
            q_norm=rotation.norm,
            k_norm=k_norm,
            eps=rotation.eps,
        )
        assert rotated is not None  # there were queries
        out = dense(
            rotated[:, 0], k_cache, v_cache, mask, high + 1, scale, plain=problem.plain, op=op
        )
        return out, k_cache, v_cache
    if mask is None:
        mask = jnp.ones((problem.b, 1), bool)
    operands = (q, k, v, k_cache, v_cache, mask, low, high, rotation, k_norm, scale)
    if chosen == "reference":
        from pallas_kernels.attention_step.reference import attention_step as reference

        return reference(*operands)
    from pallas_kernels.attention_step.triton import attention_step as run

    return run(*operands, config)


def _check_new(
    op: str,
    k: jax.Array,
    v: jax.Array,
    rotation: Rotation,
    k_norm: jax.Array | None,
    k_cache: jax.Array,
) -> None:
    b, _, hk, d = k_cache.shape
    for name, array in {"k": k, "v": v}.items():
        if array.shape != (b, hk, d) or array.dtype != k_cache.dtype:
            raise ValueError(
                f"{op}: {name} is {array.dtype}{list(array.shape)}, expected "
                f"{k_cache.dtype}{[b, hk, d]} as the cache"
            )
    if (rotation.norm is None) != (k_norm is None):
        raise ValueError(f"{op}: give rotation.norm and k_norm, or none of them")
    if k_norm is not None and k_norm.shape != (d,):
        raise ValueError(f"{op}: k_norm is {k_norm.shape}, expected {(d,)}")
