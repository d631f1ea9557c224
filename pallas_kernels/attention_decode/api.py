"""The public function of decode attention."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels._attention.checks import check_heads, check_rows, check_settings
from pallas_kernels._attention.config import AttentionConfig, AttentionImplementation
from pallas_kernels._attention.problem import AttentionProblem
from pallas_kernels._attention.ranges import visible_ranges
from pallas_kernels.dispatch import resolve


def attention_decode(
    q: Float[Array, "B Hq d"],
    k_cache: Float[Array, "B S Hk d"],
    v_cache: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"] | None,
    lengths: Int[Array, " B"],
    *,
    first: Int[Array, " B"] | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
    expected_sparsity: float | None = None,
    implementation: AttentionImplementation | None = None,
    config: AttentionConfig | None = None,
) -> Float[Array, "B Hq d"]:
    """One query a row: `out[b, h] = mask ? softmax_s(scale q[b, h] . k[b, s, h']) v[b, s, h'] : 0`.

    h' = h // (Hq / Hk). Row b's query is its newest token, at slot lengths[b] - 1, whose k and v
    are in the cache; it sees slots `first[b] <= s < lengths[b]`, inside the window. Sums are
    float32 and do not depend on how slots are split over programs beyond float32 rounding.
    Skipped heads and rows of no tokens are exact zeros; slots outside may hold NaN. The kernel
    reads k and v of a kv head once, and not at all when every group that reads them is off.

    Args:
        q: rotated queries, bfloat16, float16 or float32.
        k_cache: rotated keys of q's dtype.
        v_cache: values, like k_cache.
        mask: True = active; group g is heads `g Hq / Ga ...`. None: everything is on.
        lengths: slots of every row that hold tokens, the query's own included.
        first: the first of them, where rows are padded on the left. None: 0.
        sliding_window: how many slots a query sees at most, its own included.
        scale: of the logits, by default d ** -0.5.
        expected_sparsity: static hint for the choice of implementation, never for the result.
        implementation: `reference`, `dense` (cuDNN, then zeros), `triton`: runs or raises. None:
            what the table of this device says (`pallas_kernels.explain`).
        config: tile sizes for a named kernel, in place of the table's.

    Raises:
        ValueError: shapes, dtypes or names that do not fit, with the numbers.
        NotImplementedError: the named implementation cannot run this here; or the result of a
            kernel is being differentiated.
    """
    problem = decode_problem(
        "attention_decode",
        q,
        k_cache,
        v_cache,
        mask,
        lengths,
        first=first,
        sliding_window=sliding_window,
        expected_sparsity=expected_sparsity,
    )
    scale = check_settings("attention_decode", sliding_window, scale, problem.d)
    if 0 in (problem.b, problem.s):
        return jnp.zeros(q.shape, q.dtype)
    chosen, config = resolve(problem, implementation, config)
    if chosen == "dense":
        from pallas_kernels.attention_decode.dense import attention as dense

        return dense(q, k_cache, v_cache, mask, lengths, scale, plain=problem.plain)
    low, high = decode_ranges(problem.s, lengths, first, sliding_window)
    if mask is None:
        mask = jnp.ones((problem.b, 1), bool)
    if chosen == "reference":
        from pallas_kernels.attention_decode.reference import attention as reference

        return reference(q, k_cache, v_cache, mask, low, high, scale)
    from pallas_kernels.attention_decode.triton import attention as run

    return run(q, k_cache, v_cache, mask, low, high, scale, config)


def decode_problem(
    op: str,
    q: Float[Array, "B Hq d"],
    k_cache: Float[Array, "B S Hk d"],
    v_cache: Float[Array, "B S Hk d"],
    mask: Bool[Array, "B Ga"] | None,
    lengths: Int[Array, " B"],
    *,
    first: Int[Array, " B"] | None,
    sliding_window: int | None,
    expected_sparsity: float | None,
) -> AttentionProblem:
    """What tables know of a call by: `attention_decode`'s facts, whichever `op` asks.

    Raises `ValueError`, in the name of `op`, on operands that do not fit.
    """
    if q.ndim != 3:
        raise ValueError(f"{op}: q must be [B, Hq, d], got {q.shape}")
    groups = None if mask is None else mask.shape[-1]
    check_heads(op, q, k_cache, v_cache, groups, names=("k_cache", "v_cache"))
    (b, hq, d), (s, hk) = q.shape, k_cache.shape[1:3]
    if mask is not None and (mask.ndim != 2 or mask.shape[0] != b or mask.dtype != jnp.bool_):
        raise ValueError(f"{op}: mask must be bool [{b}, Ga], got {mask.dtype}{list(mask.shape)}")
    check_rows(op, b, lengths=lengths, first=first)
    return AttentionProblem(
        "attention_decode",
        b,
        1,
        s,
        hq,
        hk,
        d,
        hq if mask is None else hq // mask.shape[1],
        q.dtype.name,
        0.0 if mask is None else expected_sparsity,
        first is None and sliding_window is None,
    )


def decode_ranges(
    slots: int,
    lengths: Int[Array, " B"],
    first: Int[Array, " B"] | None,
    sliding_window: int | None,
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """The lowest slot that each row's newest token sees, and its own; (S, -1) without one."""
    low, high = visible_ranges(
        1,
        slots,
        start=lengths - 1,
        lengths=lengths,
        first=jnp.zeros(lengths.shape, jnp.int32) if first is None else first,
        segment_ids=None,
        sliding_window=sliding_window,
    )
    return low[:, 0], high[:, 0]
