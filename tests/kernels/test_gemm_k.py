"""`gemm_k`: the contract of an input-pruned product, for every implementation."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import gemm_k, mask_layout
from pallas_kernels._common.testing import PATTERNS, random_mask, relative_error
from tests.kernels.contract import Shape, poison_memory, running

IMPLEMENTATIONS = ("reference", "dense", "triton")
KEY = jax.random.key(5)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def operands(shape: Shape, dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
    """h[m, k], w[n, k], bias[n], residual[m, n]."""
    rng = np.random.default_rng(seed)
    m, n, k = shape.m, shape.n, shape.k
    sizes = ((m, k), (n, k), (n,), (m, n))
    scales = (1.0, k**-0.5, 1.0, 1.0)
    arrays = [rng.standard_normal(s, np.float32) * c for s, c in zip(sizes, scales, strict=True)]
    return tuple(jnp.asarray(a, dtype) for a in arrays)


def groups(shape: Shape) -> int:
    return -(-shape.k // shape.group)


def half(shape: Shape) -> jax.Array:
    return random_mask(KEY, shape.m, groups(shape), 0.5)


def zeroed(h: jax.Array, mask: jax.Array, shape: Shape, fill: float = 0.0) -> jax.Array:
    """h with `fill` in its skipped pairs."""
    return jnp.where(jnp.repeat(mask, shape.group, axis=1)[:, : shape.k], h, fill)


def run(h, w, bias, residual, mask, shape: Shape, implementation, **kwargs) -> jax.Array:
    layout = mask_layout(mask, implementation="xla")
    with running(implementation):
        return jax.jit(
            lambda h, w, bias, residual, layout: gemm_k(
                h,
                w,
                layout,
                bias=bias,
                residual=residual,
                group_size=shape.group,
                implementation=implementation,
                **kwargs,
            )
        )(h, w, bias, residual, layout)


def by_hand(h, w, bias, residual, mask, shape: Shape) -> np.ndarray:
    """The formula in float64 NumPy, group by group."""
    h, w = (np.asarray(a, np.float64) for a in (h, w))
    y = np.zeros((shape.m, shape.n))
    for g in range(groups(shape)):
        channels = slice(g * shape.group, min((g + 1) * shape.group, shape.k))
        on = np.asarray(mask[:, g])
        y[on] += h[on, channels] @ w[:, channels].T
    if bias is not None:
        y += np.asarray(bias, np.float64)
    if residual is not None:
        y += np.asarray(residual, np.float64)
    return y


def error_bound(h, w, bias, residual, mask, shape: Shape, expected: np.ndarray) -> float:
    """1.5 times the error of XLA's product of zeroed inputs, in the dtype itself."""
    if h.dtype == jnp.float32:
        return 2e-6
    y = jnp.einsum("mk,nk->mn", zeroed(h, mask, shape), w).astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :] + residual.astype(jnp.float32)
    return 1.5 * relative_error(y.astype(h.dtype), jnp.asarray(expected, jnp.float32)) + 1e-4


def check(implementation, shape: Shape, dtype: str, mask: jax.Array, plain=False, **kwargs):
    """Right values with NaN in all skipped pairs; a token that skips all keeps its residual."""
    h, w, bias, residual = operands(shape, dtype)
    if plain:
        bias = residual = None
    expected = by_hand(h, w, bias, residual, mask, shape)
    poison_memory()
    y = run(
        zeroed(h, mask, shape, jnp.nan), w, bias, residual, mask, shape, implementation, **kwargs
    )
    assert y.shape == (shape.m, shape.n)
    assert y.dtype == h.dtype
    bound = error_bound(h, w, bias, residual, mask, shape, expected)
    assert relative_error(y, jnp.asarray(expected, jnp.float32)) <= bound
    untouched = ~np.asarray(mask.any(axis=1))
    alone = 0.0 if plain else residual.astype(jnp.float32) + bias.astype(jnp.float32)
    alone = np.broadcast_to(np.asarray(jnp.asarray(alone).astype(dtype), np.float32), y.shape)
    np.testing.assert_array_equal(np.asarray(y, np.float32)[untouched], alone[untouched])


PATTERN_SHAPE = Shape(m=150, n=72, k=96, group=32)


@each_implementation
@pytest.mark.parametrize("pattern", PATTERNS)
def test_mask_patterns(implementation, pattern):
    mask = PATTERNS[pattern](KEY, PATTERN_SHAPE.m, groups(PATTERN_SHAPE))
    check(implementation, PATTERN_SHAPE, "bfloat16", mask)


@each_implementation
@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 65, 192])
def test_token_counts(implementation, tokens):
    shape = Shape(tokens, 64, 64, 32)
    check(implementation, shape, "bfloat16", half(shape))


@each_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tokens", [1, 20, 80])
def test_dtypes(implementation, dtype, tokens):
    shape = Shape(tokens, 64, 96, 32)
    check(implementation, shape, dtype, half(shape))


@each_implementation
def test_zeroed_inputs_may_be_promised(implementation):
    """With zeros where a group is skipped, the promise changes nothing."""
    shape = PATTERN_SHAPE
    h, w, bias, residual = operands(shape, "bfloat16")
    mask = half(shape)
    h = zeroed(h, mask, shape)
    plain = run(h, w, bias, residual, mask, shape, implementation)
    promised = run(h, w, bias, residual, mask, shape, implementation, inputs_zeroed=True)
    np.testing.assert_array_equal(np.asarray(plain, np.float32), np.asarray(promised, np.float32))


def test_case_A6_a_bias_is_added_once_whatever_the_mask():
    h = w = jnp.ones((4, 4))
    layout = mask_layout(jnp.zeros((4, 2), bool))
    y = gemm_k(h, w, layout, bias=jnp.full(4, 0.25), residual=h)
    np.testing.assert_array_equal(y, np.full((4, 4), 1.25))


@pytest.fixture
def unchecked_types():
    """As users run it: without the shape checks that tests add."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@each_implementation
@pytest.mark.usefixtures("unchecked_types")
def test_misfits_are_refused_with_numbers(implementation):
    shape = Shape(20, 48, 64, 32)
    h, w, bias, residual = operands(shape, "bfloat16")
    layout = mask_layout(half(shape))

    def call(h=h, w=w, **kwargs):
        return gemm_k(h, w, layout, implementation=implementation, **kwargs)

    with pytest.raises(ValueError, match="20 tokens, h has 19"):
        call(h[:19])
    with pytest.raises(ValueError, match="h has 64 inputs"):
        call(w=w[:, :47])
    with pytest.raises(ValueError, match="w is float16, but h is bfloat16"):
        call(w=w.astype(jnp.float16))
    with pytest.raises(ValueError, match="over 64 inputs are 4, but the layout has 2"):
        call(group_size=16)
    with pytest.raises(ValueError, match="int32"):
        call(h.astype(jnp.int32), w.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"bias is bfloat16\[47\]"):
        call(bias=bias[:47])
    with pytest.raises(ValueError, match=r"residual is bfloat16\[20, 47\]"):
        call(residual=residual[:, :47])
    with pytest.raises(ValueError, match="2 groups do not divide 63 inputs"):
        call(h[:, :63], w[:, :63])
    with pytest.raises(
        ValueError, match="unknown implementation='cuda'; known: reference, dense, triton"
    ):
        gemm_k(h, w, layout, implementation="cuda")


@each_implementation
def test_case_E4_no_tokens_is_no_launch(implementation):
    layout = mask_layout(jnp.zeros((0, 2), bool))
    y = gemm_k(jnp.zeros((0, 64)), jnp.ones((48, 64)), layout, implementation=implementation)
    assert y.shape == (0, 48)
