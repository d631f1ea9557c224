"""Decode attention: split slots, packed heads, and what is never read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._attention.config import DecodeConfig, FlashConfig
from pallas_kernels._common.testing import PATTERNS, interpreted, random_mask
from pallas_kernels.attention_decode import attention_decode
from tests.kernels.attention import (
    HEAD_SIZES,
    HEADS,
    KEY,
    AttentionShape,
    assert_right,
    decode,
    visible,
)
from tests.kernels.contract import ON_GPU, poison_memory

# Rows: empty, one slot, part of a split, splits and a bit, all slots.
LENGTHS = np.array([0, 1, 13, 70, 100])
SMALL = AttentionShape(b=5, t=1, s=100, hq=6, hk=2, d=64, groups=2)
SPLIT = DecodeConfig(32, 16, 4, 2)
CONFIGS = {"triton": SPLIT}

each = pytest.mark.parametrize("implementation", ["reference", "triton"])


def half(shape: AttentionShape) -> jax.Array:
    return random_mask(KEY, shape.b, shape.groups, 0.5)


def check(shape, mask, implementation, dtype="bfloat16", config=None, lengths=LENGTHS, **ranges):
    operands = shape.operands(dtype)
    poison_memory()
    y = decode(operands, mask, lengths, implementation, config, **ranges)
    seen = visible(shape, start=lengths - 1, lengths=lengths, **ranges)
    assert_right(y, operands, mask, seen)


@each
@pytest.mark.parametrize(
    "ranges",
    [{}, dict(first=[0, 0, 5, 40, 99]), dict(sliding_window=20), dict(sliding_window=1)],
    ids=str,
)
def test_visible_ranges(implementation, ranges):
    mask = half(SMALL).at[3:].set(True)
    check(SMALL, mask, implementation, "float32", CONFIGS.get(implementation), **ranges)


@each
@pytest.mark.parametrize("pattern", PATTERNS)
def test_mask_patterns(implementation, pattern):
    mask = PATTERNS[pattern](KEY, SMALL.b, SMALL.groups)
    check(SMALL, mask, implementation, config=CONFIGS.get(implementation))


SHAPES = [
    AttentionShape(2, 1, 40, hq, hk, HEAD_SIZES[i % 5], (1, hk, hq)[i % 3])
    for i, (hq, hk) in enumerate(HEADS)
] + [AttentionShape(2, 1, 40, 8, 2, d, 8) for d in HEAD_SIZES]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_groups_and_head_sizes(shape):
    mask = half(shape).at[0, 0].set(True)
    check(shape, mask, "triton", config=SPLIT, lengths=np.array([40, 33]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(dtype):
    check(SMALL, half(SMALL), "triton", dtype, SPLIT)


@pytest.mark.parametrize("rows", [1, 64])
def test_rows(rows):
    shape = AttentionShape(rows, 1, 48, 2, 1, 64, 2)
    lengths = np.random.default_rng(0).integers(0, 49, rows)
    check(shape, half(shape), "triton", config=SPLIT, lengths=lengths)


@pytest.mark.skipif(not ON_GPU, reason="XLA on a CPU has no cuDNN")
def test_dense():
    check(SMALL, half(SMALL), "dense")


@pytest.mark.skipif(not ON_GPU, reason="shapes for a GPU")
@pytest.mark.parametrize("d", HEAD_SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_compiled_kernel(d, dtype):
    """The config that dispatch picks, on long ragged rows."""
    shape = AttentionShape(7, 1, 5000, 8, 2, d, 4)
    lengths = np.array([0, 1, 700, 4097, 4999, 5000, 64])
    check(shape, half(shape), "triton", dtype, lengths=lengths)
    check(shape, half(shape), "triton", dtype, lengths=lengths, sliding_window=1000)


def test_the_result_does_not_depend_on_the_splits():
    """float32, 1e-5, whatever the split; and reruns are bit-identical."""
    operands = SMALL.operands("float32")
    mask = jnp.ones((5, 2), bool)
    results = []
    for config in (DecodeConfig(16, 16, 4, 1), SPLIT, DecodeConfig(128, 32, 4, 2)):
        y = decode(operands, mask, LENGTHS, "triton", config)
        np.testing.assert_array_equal(y, decode(operands, mask, LENGTHS, "triton", config))
        results.append(y)
    for y in results[1:]:
        np.testing.assert_allclose(y, results[0], rtol=1e-5, atol=1e-5)


def test_more_splits_than_the_merge_reads_at_once():
    shape = AttentionShape(2, 1, 2100, 2, 1, 16, 1)
    mask = jnp.ones((2, 1), bool)
    check(shape, mask, "triton", "float32", DecodeConfig(16, 16, 4, 1), np.array([2090, 40]))


@each
def test_nobody_reads_what_no_active_group_needs(implementation):
    """NaN beyond a row's slots and before its first, and in a kv head whose groups are all off."""
    q, k, v = SMALL.operands("bfloat16")
    mask = jnp.ones((5, 2), bool).at[:, 0].set(False)
    first = np.array([0, 0, 5, 40, 99])
    slot = np.arange(SMALL.s)[None, :]
    empty = (slot >= LENGTHS[:, None]) | (slot < first[:, None])
    k, v = (jnp.where(empty[..., None, None], jnp.nan, x) for x in (k, v))
    clean = decode(
        (q, k, v), mask, LENGTHS, implementation, CONFIGS.get(implementation), first=first
    )
    assert_right(clean, (q, k, v), mask, visible(SMALL, LENGTHS - 1, LENGTHS, first))
    if implementation == "triton":
        k, v = k.at[:, :, 0].set(jnp.nan), v.at[:, :, 0].set(jnp.nan)
        y = decode((q, k, v), mask, LENGTHS, implementation, SPLIT, first=first)
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(clean, np.float32))


@each
def test_large_logits_stay_finite(implementation):
    operands = SMALL.operands("float32", scale=300.0)
    mask = jnp.ones((5, 2), bool)
    y = decode(operands, mask, LENGTHS, implementation, CONFIGS.get(implementation))
    assert jnp.isfinite(y).all()
    assert_right(y, operands, mask, visible(SMALL, LENGTHS - 1, LENGTHS))


def test_decode_is_the_last_query_of_prefill():
    from tests.kernels.attention import prefill

    shape = AttentionShape(2, 1, 60, 4, 2, 64, 2)
    operands = shape.operands("float32")
    mask, lengths = half(shape), np.array([60, 31])
    np.testing.assert_allclose(
        decode(operands, mask, lengths, "reference"),
        prefill(operands, mask, "reference", start=lengths - 1, lengths=lengths),
        atol=1e-6,
    )


def test_no_mask_means_everything_on():
    q, k, v = SMALL.operands("float32")
    lengths = jnp.asarray(LENGTHS)
    np.testing.assert_array_equal(
        attention_decode(q[:, 0], k, v, None, lengths),
        attention_decode(q[:, 0], k, v, jnp.ones((5, 3), bool), lengths),
    )
    assert attention_decode(q[:0, 0], k[:0], v[:0], None, lengths[:0]).shape == (0, 6, 64)


@pytest.mark.usefixtures("unchecked_types")
def test_refusals():
    q, k, v = SMALL.operands("bfloat16")
    lengths, mask = jnp.asarray(LENGTHS), half(SMALL)

    def call(q=q[:, 0], k=k, v=v, mask=mask, lengths=lengths, **kwargs):
        return attention_decode(q, k, v, mask, lengths, **kwargs)

    with pytest.raises(ValueError, match=r"mask must be bool \[5, Ga\]"):
        call(mask=mask[:4])
    with pytest.raises(ValueError, match="q must be"):
        call(q=q)
    with pytest.raises(ValueError, match="lengths must be integers"):
        call(lengths=lengths[:4])
    with pytest.raises(ValueError, match="4 groups do not divide 6"):
        call(mask=jnp.ones((5, 4), bool))
    with pytest.raises(ValueError, match="unknown implementation='mosaic'"):
        call(implementation="mosaic")
    with pytest.raises(NotImplementedError, match="neither first nor sliding_window"):
        call(implementation="dense", sliding_window=4)
    with interpreted(), pytest.raises(NotImplementedError, match="no form for"):
        call(implementation="triton", config=FlashConfig(32, 32, 4, 2))
    with pytest.raises(ValueError, match="split=16 must be at least block_n=32"):
        DecodeConfig(16, 32, 4, 2)


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
def test_a_kernel_named_on_a_cpu_raises():
    q, k, v = SMALL.operands("bfloat16")
    with pytest.raises(NotImplementedError, match=r"capability 8\.0"):
        attention_decode(q[:, 0], k, v, None, jnp.asarray(LENGTHS), implementation="triton")
