"""The public function of prefill attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._attention.checks import check_heads, check_rows, check_settings
from pallas_kernels._attention.config import AttentionConfig, AttentionImplementation
from pallas_kernels._attention.problem import AttentionProblem
from pallas_kernels._attention.ranges import visible_ranges
from pallas_kernels.dispatch import resolve
from pallas_kernels.layout import MaskLayout
from pallas_kernels.rope_cache.reference import rotated
from pallas_kernels.rope_cache.rotation import Rotation


def attention_prefill(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B S Hk d"],
    v: Float[Array, "B S Hk d"],
    layout: MaskLayout | None,
    *,
    start: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    first: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
    rotation: Rotation | None = None,
    implementation: AttentionImplementation | None = None,
    config: AttentionConfig | None = None,
) -> Float[Array, "B T Hq d"]:
    """`out[b, t, h] = mask ? softmax_s(scale q[b, t, h] . k[b, s, h']) v[b, s, h'] : 0`, causal.

    h' = h // (Hq / Hk). Query t of row b sits at slot p = start[b] + t and sees slots s <= p that
    are tokens of its row, of its segment, and inside the window (s > p - sliding_window). Sums
    are float32. Skipped (token, group) pairs are exact zeros, and so is a query that sees no key
    or is padding itself; k and v of slots that hold no token may be NaN.

    Args:
        q: queries, bfloat16, float16 or float32, rotated already if `rotation` is None.
        k: rotated keys of q's dtype, complete (nothing is skipped there): the new tokens' too.
        v: values, like k.
        layout: `mask_layout` over the M = B T tokens, row after row; group g is heads
            `g Hq / Ga ...`. None: everything is on.
        start: slot of every row's first query. None: S - T, so S == T means from slot 0.
        lengths: slots of every row that hold tokens, the new ones included. None: S.
        first: the first of them, where rows are padded on the left. None: 0.
        segment_ids: of slots; a segment is a run of equal, non-zero ids, 0 is padding at the ends.
        sliding_window: how many slots a query sees at most, its own included.
        scale: of the logits, by default d ** -0.5.
        rotation: norms and turns q first; `mosaic` does it while it gathers the active queries.
            None: q is used as it is.
        implementation: `reference`, `dense` (cuDNN, then zeros), `triton`, `mosaic` (Hopper):
            runs or raises. None: what the table of this device says
            (`pallas_kernels.explain`).
        config: tile sizes for a named kernel, in place of the table's.

    Raises:
        ValueError: shapes, dtypes or names that do not fit, with the numbers.
        NotImplementedError: the named implementation cannot run this here; or the result of a
            kernel is being differentiated.
    """
    op = "attention_prefill"
    if q.ndim != 4:
        raise ValueError(f"{op}: q must be [B, T, Hq, d], got {q.shape}")
    check_heads(op, q, k, v, None if layout is None else layout.groups)
    (b, t, hq, d), (s, hk) = q.shape, k.shape[1:3]
    if layout is not None and layout.tokens != b * t:
        raise ValueError(f"{op}: the layout is of {layout.tokens} tokens, q has {b} x {t}")
    if start is None and t > s:
        raise ValueError(f"{op}: {t} queries but {s} slots; pass start")
    check_rows(op, b, start=start, lengths=lengths, first=first)
    if segment_ids is not None and segment_ids.shape != (b, s):
        raise ValueError(f"{op}: segment_ids is {segment_ids.shape}, expected {(b, s)}")
    scale = check_settings(op, sliding_window, scale, d)
    if rotation is not None:
        rotation.check(op, b, t, d)
    if 0 in (b, t, s):
        return jnp.zeros(q.shape, q.dtype)
    plain = start is None and first is None and segment_ids is None and s == t
    from_start = first is None and segment_ids is None and sliding_window is None
    problem = AttentionProblem(
        op,
        b,
        t,
        s,
        hq,
        hk,
        d,
        hq if layout is None else hq // layout.groups,
        q.dtype.name,
        0.0 if layout is None else layout.expected_sparsity,
        plain,
        from_start,
    )
    chosen, config = resolve(problem, implementation, config)
    if rotation is not None and chosen != "mosaic":
        q = rotated(q, rotation.cos, rotation.sin, rotation.norm, rotation.eps)
    if chosen == "dense":
        from pallas_kernels.attention_prefill.dense import attention as dense

        mask = None if layout is None else layout.mask
        return dense(q, k, v, mask, lengths, sliding_window, scale, plain=plain)
    low, high = visible_ranges(
        t,
        s,
        start=jnp.full((b,), s - t, jnp.int32) if start is None else start,
        lengths=jnp.full((b,), s, jnp.int32) if lengths is None else lengths,
        first=jnp.zeros((b,), jnp.int32) if first is None else first,
        segment_ids=segment_ids,
        sliding_window=sliding_window,
    )
    if layout is None:
        layout = everything_on(b * t)
    if chosen == "reference":
        from pallas_kernels.attention_prefill.reference import attention as reference

        return reference(q, k, v, layout.mask, low, high, scale)
    if chosen == "triton":
        from pallas_kernels.attention_prefill.triton import attention as triton

        return triton(q, k, v, layout, low, high, scale, config)
    from pallas_kernels.attention_prefill.mosaic import attention as mosaic

    return mosaic(
        q,
        k,
        v,
        layout,
        low,
        high,
        scale,
        config,
        rotation=rotation,
        from_start=from_start,
        all_slots_real=lengths is None and first is None and segment_ids is None,
    )


def everything_on(tokens: int) -> MaskLayout:
    """The layout of one group that runs for every token."""
    return MaskLayout(
        jnp.ones((tokens, 1), bool),
        jnp.arange(tokens, dtype=jnp.int32)[None],
        jnp.full((1,), tokens, jnp.int32),
        0.0,
    )
