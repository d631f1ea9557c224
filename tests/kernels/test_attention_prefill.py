"""Prefill attention: the contract of the pruned ops, and every range of visible keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels._attention.config import FlashConfig, MosaicConfig
from pallas_kernels._common.testing import PATTERNS, interpreted, random_mask
from pallas_kernels.attention_prefill import attention_prefill
from pallas_kernels.rope_cache import Rotation, rope_cache
from pallas_kernels.rope_cache.reference import rotated
from tests.kernels.attention import (
    HEAD_SIZES,
    HEADS,
    KEY,
    AttentionShape,
    assert_right,
    prefill,
    visible,
)
from tests.kernels.contract import ON_GPU, poison_memory, running

SMALL = AttentionShape(b=2, t=70, s=70, hq=4, hk=2, d=64, groups=2)
TRITON = FlashConfig(32, 32, 4, 2)  # small tiles, so that small shapes have several
MOSAIC = MosaicConfig(64, 2)
KERNELS = {"triton": TRITON, "mosaic": MOSAIC}


def half(shape: AttentionShape) -> jax.Array:
    return random_mask(KEY, shape.b * shape.t, shape.groups, 0.5)


def check(shape, mask, implementation, dtype="bfloat16", config=None, operands=None, **ranges):
    operands = shape.operands(dtype) if operands is None else operands
    poison_memory()
    y = prefill(operands, mask, implementation, config, **ranges)
    assert_right(y, operands, mask, visible(shape, **ranges))


# One way to limit what a query sees each, and all of them together.
CHUNK = AttentionShape(b=2, t=40, s=150, hq=4, hk=2, d=64, groups=2)
RANGES = {
    "bottom_right": {},
    "chunk": dict(start=[70, 0], lengths=[110, 40]),
    "ragged": dict(start=[70, 30], lengths=[90, 31]),
    "left_padded": dict(first=[120, 7]),
    "window": dict(sliding_window=33),
    "segments": dict(segment_ids=[[1] * 100 + [2] * 30 + [3] * 20, [1] * 130 + [2] * 9 + [0] * 11]),
    "all": dict(
        start=[70, 100],
        lengths=[110, 135],
        first=[30, 0],
        sliding_window=50,
        segment_ids=[[1] * 90 + [2] * 60, [1] * 110 + [2] * 40],
    ),
}


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_visible_ranges(implementation, ranges):
    config = KERNELS.get(implementation)
    check(CHUNK, half(CHUNK), implementation, "float32", config, **RANGES[ranges])


MOSAIC_CHUNK = AttentionShape(b=1, t=150, s=200, hq=2, hk=1, d=64, groups=1)


@pytest.fixture
def no_races(capfd):
    """Pallas' interpreter prints the races that it finds."""
    yield
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    "ranges",
    [
        {},
        dict(start=[20], lengths=[150]),
        dict(start=[30], lengths=[160], first=[40], sliding_window=70),
    ],
    ids=["bottom_right", "ragged", "bounded_below"],
)
def test_mosaic_in_its_interpreter(ranges):
    """Values and races: two warpgroups that take turns, a ring of buffers, slots nobody sees."""
    mask = half(MOSAIC_CHUNK)
    q, k, v = MOSAIC_CHUNK.operands("bfloat16")
    seen = visible(MOSAIC_CHUNK, **ranges)
    nobody = jnp.asarray(~seen.any(axis=1))[:, :, None, None]
    if "lengths" in ranges:
        k, v = jnp.where(nobody, jnp.nan, k), jnp.where(nobody, jnp.nan, v)
    check(MOSAIC_CHUNK, mask, "mosaic", config=MOSAIC, operands=(q, k, v), **ranges)


@pytest.mark.usefixtures("no_races")
def test_mosaic_on_whole_ragged_rows():
    """What dispatch picks on Hopper: rows from slot 0, NaN in v past their lengths."""
    shape = AttentionShape(b=2, t=150, s=150, hq=2, hk=1, d=64, groups=1)
    q, k, v = shape.operands("bfloat16")
    lengths = [150, 70]
    past = (jnp.arange(150) >= jnp.array(lengths)[:, None])[:, :, None, None]
    operands = (q, jnp.where(past, jnp.nan, k), jnp.where(past, jnp.nan, v))
    check(shape, half(shape), "mosaic", config=MOSAIC, operands=operands, lengths=lengths)


def rotation(shape: AttentionShape, dtype: str, *, normed: bool) -> Rotation:
    angles = np.random.default_rng(3).uniform(-3, 3, (shape.b, shape.t, shape.d // 2))
    norm = jnp.linspace(0.5, 1.5, shape.d).astype(dtype) if normed else None
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    return Rotation(cos, sin, norm, 1e-6 if normed else 0.0)


def rotated_before(q, k, v, turning: Rotation, implementation):
    """The queries as `rope_cache` gives them to an attention that does not rotate."""
    new, slots = k[:, : q.shape[1]], jnp.full(q.shape[:2], -1, jnp.int32)

    @jax.jit
    def call(q, new, k, turning):
        return rope_cache(
            *(q, new, new, turning.cos, turning.sin, k, k, slots),
            q_norm=turning.norm,
            k_norm=turning.norm,
            eps=turning.eps,
            implementation=implementation,
        )[0]

    with running(implementation):
        return jax.block_until_ready(call(q, new, k, turning))


def check_rotation(shape, implementation, dtype, config, *, normed, **ranges):
    """Bit for bit what rotating first gives, and right, whatever skipped queries hold."""
    q, k, v = shape.operands(dtype)
    mask = half(shape)
    on = jnp.repeat(mask.reshape(shape.b, shape.t, -1), shape.hq // shape.groups, axis=-1)
    poisoned = jnp.where(on[..., None], q, jnp.nan)
    turning = rotation(shape, dtype, normed=normed)
    got = prefill((poisoned, k, v), mask, implementation, config, rotation=turning, **ranges)
    if not ON_GPU:  # where a head's sum of squares may be added up in another order
        rope = "triton" if implementation == "mosaic" else "reference"
        before = rotated_before(poisoned, k, v, turning, rope)
        wanted = prefill((before, k, v), mask, implementation, config, **ranges)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
    exact = rotated(q, turning.cos, turning.sin, turning.norm, turning.eps)
    assert_right(got, (exact, k, v), mask, visible(shape, **ranges))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("d", [64, 80, 96])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_queries_are_rotated_first(implementation, d, normed):
    shape = AttentionShape(b=2, t=20, s=30, hq=4, hk=2, d=d, groups=2)
    ranges = dict(start=[5, 10], lengths=[25, 17], first=[2, 0])
    dtype = "float32" if d == 80 else "bfloat16"
    check_rotation(
        shape, implementation, dtype, KERNELS.get(implementation), normed=normed, **ranges
    )


@pytest.mark.skipif(not ON_GPU, reason="XLA on a CPU has no cuDNN")
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_dense_rotates_first(normed):
    shape = AttentionShape(b=2, t=70, s=70, hq=4, hk=2, d=96, groups=2)
    check_rotation(shape, "dense", "bfloat16", None, normed=normed, lengths=[70, 33])


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    ("d", "dtype", "normed", "tokens", "slots", "ranges"),
    [
        (64, "bfloat16", False, 70, 70, dict(lengths=[70, 40])),
        (64, "float16", True, 150, 200, dict(start=[20, 50], lengths=[150, 200])),
        (128, "bfloat16", True, 70, 70, dict(first=[50, 7])),
        (256, "float16", True, 70, 70, {}),
    ],
    ids=["ragged", "chunk", "left_padded", "wide_heads"],
)
def test_mosaic_rotates_the_queries_that_it_gathers(d, dtype, normed, tokens, slots, ranges):
    shape = AttentionShape(b=2, t=tokens, s=slots, hq=2, hk=1, d=d, groups=2)
    check_rotation(shape, "mosaic", dtype, MOSAIC, normed=normed, **ranges)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_mask_patterns(implementation, pattern):
    mask = PATTERNS[pattern](KEY, SMALL.b * SMALL.t, SMALL.groups)
    check(SMALL, mask, implementation, config=KERNELS.get(implementation))


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("pattern", ["ragged", "one_token_only"])
def test_mask_patterns_in_mosaic(pattern):
    shape = AttentionShape(b=2, t=140, s=140, hq=2, hk=2, d=64, groups=2)
    check(shape, PATTERNS[pattern](KEY, 280, 2), "mosaic", config=MOSAIC)


SHAPES = [
    AttentionShape(1, 18, 18, hq, hk, HEAD_SIZES[i % 5], (1, hk, hq)[i % 3])
    for i, (hq, hk) in enumerate(HEADS)
] + [AttentionShape(1, 18, 18, 4, 2, d, 2) for d in HEAD_SIZES]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_groups_and_head_sizes(shape):
    """Groups of one head up to all heads; some split a kv head's queries, some span kv heads."""
    check(shape, half(shape), "triton")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(dtype):
    check(SMALL, half(SMALL), "triton", dtype, TRITON)


@pytest.mark.parametrize("tokens", [1, 33])
def test_token_counts(tokens):
    shape = AttentionShape(3, tokens, tokens, 2, 1, 64, 2)
    check(shape, half(shape), "triton", config=TRITON)


@pytest.mark.skipif(not ON_GPU, reason="XLA on a CPU has no cuDNN")
@pytest.mark.parametrize("ranges", [{}, dict(lengths=[70, 33]), dict(sliding_window=20)], ids=str)
def test_dense(ranges):
    check(SMALL, half(SMALL), "dense", **ranges)


@pytest.mark.skipif(not ON_GPU, reason="shapes for a GPU")
@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_compiled_kernels(implementation, ranges, d):
    """The configs that dispatch picks, on longer rows (the interpreters' ranges, ten times)."""
    if implementation == "mosaic" and d not in (64, 128, 256):
        pytest.skip("mosaic takes heads of 64, 128 and 256")
    shape = AttentionShape(2, 400, 1500, 8, 4, d, 4)
    longer = {}
    for name, value in RANGES[ranges].items():
        if name == "segment_ids":
            value = np.repeat(np.asarray(value), 10, axis=1)
        longer[name] = np.asarray(value) * 10 if name != "segment_ids" else value
    if "sliding_window" in longer:
        longer["sliding_window"] = int(longer["sliding_window"])
    check(shape, half(shape), implementation, **longer)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_nan_of_slots_without_tokens_does_not_leak(implementation):
    ranges = dict(start=[70, 30], lengths=[90, 31], first=[8, 0])
    q, k, v = CHUNK.operands("bfloat16")
    slot = jnp.arange(CHUNK.s)[None, :]
    empty = (slot >= jnp.array(ranges["lengths"])[:, None]) | (
        slot < jnp.array(ranges["first"])[:, None]
    )
    k, v = (jnp.where(empty[..., None, None], jnp.nan, x) for x in (k, v))
    mask = half(CHUNK).at[5].set(False)
    q = q.at[0, 5].set(jnp.nan)  # a token that skips everything
    config = KERNELS.get(implementation)
    y = prefill((q, k, v), mask, implementation, config, **ranges)
    clean = jnp.where(jnp.isnan(q), 0, q)
    assert_right(y, (clean, k, v), mask, visible(CHUNK, **ranges))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_large_logits_stay_finite(implementation):
    """Logits of about +-1e3: one key takes everything."""
    operands = SMALL.operands("float32", scale=300.0)
    y = prefill(operands, half(SMALL), implementation, KERNELS.get(implementation))
    assert jnp.isfinite(y).all()
    assert_right(y, operands, half(SMALL), visible(SMALL))


@pytest.mark.usefixtures("no_races")
def test_large_logits_stay_finite_in_mosaic():
    shape = AttentionShape(b=1, t=70, s=70, hq=2, hk=1, d=64, groups=2)
    operands, mask = shape.operands("bfloat16", scale=300.0), half(shape)
    y = prefill(operands, mask, "mosaic", MOSAIC)
    assert jnp.isfinite(y).all()
    assert_right(y, operands, mask, visible(shape))
    np.testing.assert_array_equal(
        np.asarray(y), np.asarray(prefill(operands, mask, "mosaic", MOSAIC))
    )


def elements(jaxpr) -> int:
    """Of every array outside kernels that a program makes, inner programs included."""
    total = 0
    for equation in jaxpr.eqns:
        total += sum(var.aval.size for var in equation.outvars)
        if equation.primitive.name == "pallas_call":
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                total += elements(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize(
    ("implementation", "growth"), [("triton", 2), ("mosaic", 2), ("reference", 4)]
)
def test_no_workspace_grows_with_the_square_of_tokens(implementation, growth):
    """But the reference's, which shows that the count would see one."""
    config = KERNELS.get(implementation)

    def run(q, k, v, mask):
        layout = pallas_kernels.mask_layout(mask, implementation="xla")
        return attention_prefill(q, k, v, layout, implementation=implementation, config=config)

    def made(tokens: int) -> int:
        shapes = (tokens, 4, 64), (tokens, 2, 64), (tokens, 2, 64)
        operands = [jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16) for shape in shapes]
        mask = jax.ShapeDtypeStruct((tokens, 2), bool)
        with interpreted():
            return elements(jax.make_jaxpr(run)(*operands, mask).jaxpr)

    assert made(4096) / made(2048) == pytest.approx(growth, rel=0.05)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_reruns_are_bit_identical_and_leave_nothing(implementation):
    operands = SMALL.operands("bfloat16")
    masks = [jnp.ones_like(half(SMALL)), half(SMALL), jnp.zeros_like(half(SMALL))]
    config = KERNELS.get(implementation)
    first = [np.asarray(prefill(operands, m, implementation, config)) for m in masks]
    again = [np.asarray(prefill(operands, m, implementation, config)) for m in masks[::-1]]
    for a, b in zip(first, again[::-1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_layout_means_everything_on():
    operands = SMALL.operands("float32")
    ones = pallas_kernels.mask_layout(jnp.ones((140, 2), bool))
    np.testing.assert_array_equal(
        attention_prefill(*operands, None), attention_prefill(*operands, ones)
    )
    empty = attention_prefill(*(x[:, :0] for x in operands), None)
    assert empty.shape == (2, 0, 4, 64)


def test_differentiating_a_kernel_raises():
    operands = SMALL.operands("float32")
    with interpreted(), pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda q: prefill((q, *operands[1:]), half(SMALL), "triton").sum())(operands[0])


@pytest.mark.usefixtures("unchecked_types")
def test_refusals():
    q, k, v = SMALL.operands("bfloat16")
    layout = pallas_kernels.mask_layout(half(SMALL))

    def call(q=q, k=k, v=v, layout=layout, **kwargs):
        return attention_prefill(q, k, v, layout, **kwargs)

    with pytest.raises(ValueError, match=r"layout is of 140 tokens, q has 2 x 69"):
        call(q=q[:, :69])
    with pytest.raises(ValueError, match="float16"):
        call(v=v.astype(jnp.float16))
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3"):
        call(k=jnp.zeros((2, 70, 3, 64), q.dtype), v=jnp.zeros((2, 70, 3, 64), q.dtype))
    with pytest.raises(ValueError, match="3 groups do not divide 4"):
        call(layout=pallas_kernels.mask_layout(jnp.ones((140, 3), bool)))
    with pytest.raises(ValueError, match=r"lengths must be integers \[2\]"):
        call(lengths=jnp.ones((3,), jnp.int32))
    with pytest.raises(ValueError, match="70 queries but 60 slots; pass start"):
        call(k=k[:, :60], v=v[:, :60])
    with pytest.raises(ValueError, match="sliding_window=0"):
        call(sliding_window=0)
    with pytest.raises(ValueError, match=r"scale=-1\.0"):
        call(scale=-1.0)
    with pytest.raises(ValueError, match="unknown implementation='cuda'"):
        call(implementation="cuda")
    turning = rotation(SMALL, "bfloat16", normed=True)
    for change, message in {
        "cos": (turning.cos[:, 1:], r"rotation.cos is \(2, 69, 32\), expected \(2, 70, 32\)"),
        "norm": (turning.norm[:32], r"rotation.norm is \(32,\), expected \(64,\)"),
        "sin": (turning.sin.astype(q.dtype), "float32 and bfloat16, expected float32"),
    }.items():
        with pytest.raises(ValueError, match=message[1]):
            call(rotation=dataclasses.replace(turning, **{change: message[0]}))
    with pytest.raises(ValueError, match="segment_ids"):
        call(segment_ids=jnp.ones((2, 69), jnp.int32))
    with pytest.raises(NotImplementedError, match="whole rows from slot 0"):
        call(implementation="dense", first=jnp.zeros((2,), jnp.int32))
    with interpreted(), pytest.raises(NotImplementedError, match="no form for"):
        call(implementation="triton", config=MOSAIC)
    with interpreted(), pytest.raises(NotImplementedError, match="heads of"):
        call(q[..., :48], k[..., :48], v[..., :48], implementation="mosaic", config=MOSAIC)


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_a_kernel_named_on_a_cpu_raises(implementation):
    operands = SMALL.operands("bfloat16")
    layout = pallas_kernels.mask_layout(half(SMALL))
    with pytest.raises(NotImplementedError, match=r"capability .*this one has None"):
        attention_prefill(*operands, layout, implementation=implementation)
