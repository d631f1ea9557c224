"""`gemm_k`: the contract of an input-pruned product, for every implementation."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import gemm_k, mask_layout
from pallas_kernels._common.config import KTileConfig, SmallConfig, TileConfig
from pallas_kernels._common.testing import PATTERNS, random_mask, relative_error
from pallas_kernels.gemm_k import triton as gemm_k_triton
from pallas_kernels.gemm_k.shapes import DOWN_SHAPES, OUTPUT_SHAPES
from tests.kernels.contract import ON_GPU, Shape, poison_memory, running

IMPLEMENTATIONS = ("reference", "dense", "pallas", "triton")
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


# Two super-groups or more, several tiles, bands and column blocks; ragged in every direction.
OWN_CONFIGS = (
    (Shape(400, 72, 288, 32), KTileConfig(16, 32, 4, 2, column_tiles=3, band=2)),
    (Shape(300, 40, 250, 26), KTileConfig(32, 16, 4, 2, column_tiles=1, band=3)),
    (Shape(300, 72, 96, 32), KTileConfig(32, 16, 4, 2, column_tiles=2, band=1)),
    (Shape(40, 72, 1200, 32), SmallConfig(16, 32, 4, 2)),
    (Shape(1, 72, 250, 26), SmallConfig(8, 64, 4, 1)),
)


@pytest.mark.parametrize(("shape", "config"), OWN_CONFIGS, ids=str)
@pytest.mark.parametrize("pattern", ["half", "ragged", "all_off"])
def test_configs_change_speed_only(shape, config, pattern):
    mask = PATTERNS[pattern](KEY, shape.m, groups(shape))
    check("triton", shape, "bfloat16", mask, config=config)


GROUPED = (
    Shape(m=150, n=64, k=320, group=16),
    Shape(m=70, n=40, k=144, group=48),
    Shape(m=66, n=32, k=512, group=512),
    Shape(m=5, n=100, k=257, group=48),
)


@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_group_sizes(shape):
    check("triton", shape, "bfloat16", half(shape), plain=True)


@pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("tokens", [1, 33, 1000, 4096])
@pytest.mark.parametrize("model", DOWN_SHAPES)
@pytest.mark.parametrize("shapes", [DOWN_SHAPES, OUTPUT_SHAPES], ids=["down", "o"])
def test_model_shapes(shapes, model, tokens):
    given = shapes[model]
    shape = Shape(tokens, given.n, given.k, given.group)
    check("triton", shape, "bfloat16", half(shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("magnitude", [1e-20, 1e15])
def test_partial_sums_keep_their_precision_at_any_magnitude(dtype, magnitude):
    """Partial sums are 16 bits wide for 16-bit operands, but have a power of two of their own."""
    shape = Shape(150, 64, 320, 32)
    h, w, _, _ = operands(shape, dtype)
    mask = half(shape)
    h = (h * magnitude).astype(dtype)
    expected = jnp.asarray(by_hand(h, w, None, None, mask, shape), jnp.float32)
    y = run(zeroed(h, mask, shape, jnp.nan), w, None, None, mask, shape, "triton")
    # Scaled back before the norm, which squares.
    error = relative_error(y.astype(jnp.float32) / magnitude, expected / magnitude)
    assert error <= {"bfloat16": 2.5e-3, "float32": 2e-6}[dtype]


@pytest.mark.filterwarnings(
    "ignore:invalid value|All-NaN:RuntimeWarning"
)  # the interpreter's NumPy
def test_infinity_and_nan_of_active_work_show():
    shape = Shape(150, 64, 320, 32)
    h, w, _, _ = operands(shape, "bfloat16")
    mask = half(shape).at[3].set(True).at[7].set(True)
    h = h.at[3, 40].set(jnp.inf).at[7, 40].set(jnp.nan)
    y = np.asarray(run(h, w, None, None, mask, shape, "triton"), np.float32)
    assert not np.isfinite(y[3]).any()
    assert np.isnan(y[7]).all()
    assert np.isfinite(np.delete(y, [3, 7], axis=0)).all()


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_reruns_are_bit_identical_and_leave_nothing_behind(tokens):
    """Ten calls (100 on a GPU) alternating with a fuller and an empty mask."""
    shape = Shape(tokens, 48, 320, 32)
    h, w, _, residual = operands(shape, "bfloat16")
    masks = [half(shape), jnp.ones((tokens, 10), bool), jnp.zeros((tokens, 10), bool)]

    def values(mask):
        return np.asarray(run(h, w, None, residual, mask, shape, "triton"), np.float32)

    first = [values(mask) for mask in masks]
    poison_memory()
    for _ in range(30 if ON_GPU else 1):
        for mask, before in zip(masks[::-1], first[::-1], strict=True):
            np.testing.assert_array_equal(values(mask), before)
    np.testing.assert_array_equal(first[2], np.asarray(residual, np.float32))


@pytest.mark.parametrize("implementation", ["dense", "triton"])
@pytest.mark.parametrize("tokens", [1, 80])
def test_case_E9_vmap_equals_a_loop(implementation, tokens):
    shape = Shape(tokens, 32, 64, 16)
    h, w, _, _ = operands(shape, "float32")
    hs = jnp.stack([h, 2 * h])
    masks = jnp.stack([random_mask(jax.random.key(i), tokens, 4, 0.5) for i in range(2)])

    def one(h, mask):
        layout = mask_layout(mask, k_axis=True, implementation="xla")
        return gemm_k(h, w, layout, implementation=implementation)

    with running(implementation):
        looped = jnp.stack([one(h, mask) for h, mask in zip(hs, masks, strict=True)])
        np.testing.assert_allclose(jax.vmap(one)(hs, masks), looped, rtol=1e-6, atol=1e-6)


def test_differentiating_a_kernel_raises():
    shape = Shape(20, 48, 64, 32)
    h, w, _, _ = operands(shape, "float32")
    layout = mask_layout(half(shape))
    with running("triton"), pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda h: gemm_k(h, w, layout, implementation="triton").sum())(h)


def test_a_layout_made_ahead_gives_the_same_bits():
    shape = Shape(200, 48, 320, 32)
    h, w, _, _ = operands(shape, "bfloat16")
    mask = half(shape)
    with running("triton"):
        plain = gemm_k(h, w, mask_layout(mask), implementation="triton")
        ahead = gemm_k(h, w, mask_layout(mask, k_axis=True), implementation="triton")
    np.testing.assert_array_equal(np.asarray(plain, np.float32), np.asarray(ahead, np.float32))


def test_case_E1_nothing_is_read_past_the_end():
    """N=257, K=100 in groups of 48; whole tiles, but a last super-group of 2 groups instead of 4.

    Memory after the arrays is NaN.
    """
    for shape in (Shape(33, 257, 100, 48), Shape(97, 257, 100, 48), Shape(300, 128, 320, 32)):
        h, w, _, _ = operands(shape, "bfloat16")
        larger = jnp.full((400, shape.k), jnp.nan, h.dtype).at[: shape.m].set(h)[: shape.m]
        mask = half(shape)
        y = run(larger, w, None, None, mask, shape, "triton")
        expected = by_hand(h, w, None, None, mask, shape)
        assert np.abs(np.asarray(y, np.float32) - expected).max() <= 2e-2 * np.abs(expected).max()


def test_offsets_are_wide_exactly_where_an_array_passes_2_31_elements():
    def wide(m, k):
        seen = []

        def trace(h, w, mask):
            order = mask_layout(mask, k_axis=True, implementation="xla").k_order
            arguments = gemm_k_triton.tile_arguments(
                h, w, order, None, None, k // 8, KTileConfig(128, 64, 4, 3)
            )
            seen.append(arguments[3]["WIDE"])

        shapes = (((m, k), jnp.bfloat16), ((64, k), jnp.bfloat16), ((m, 8), jnp.bool_))
        jax.eval_shape(trace, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        return seen[0]

    assert not wide(131_072, 16_376)
    assert wide(131_072, 16_384)


def test_wide_offsets_give_the_same_result(monkeypatch):
    """The kernel body with 64-bit offsets, forced on a small shape."""
    original = gemm_k_triton.tile_arguments

    def forced(*args):
        *rest, constants, grid = original(*args)
        return *rest, constants | {"WIDE": True}, grid

    monkeypatch.setattr(gemm_k_triton, "tile_arguments", forced)
    check("triton", Shape(150, 48, 320, 32), "bfloat16", half(Shape(150, 48, 320, 32)))


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
        ValueError, match="unknown implementation='cuda'; known: reference, dense, pallas, triton"
    ):
        gemm_k(h, w, layout, implementation="cuda")
    with running("triton"), pytest.raises(ValueError, match=r"config=TileConfig.*cannot run"):
        gemm_k(h, w, layout, implementation="triton", config=TileConfig(64, 32, 32, 4, 2))


@each_implementation
def test_case_E4_no_tokens_is_no_launch(implementation):
    layout = mask_layout(jnp.zeros((0, 2), bool))
    y = gemm_k(jnp.zeros((0, 64)), jnp.ones((48, 64)), layout, implementation=implementation)
    assert y.shape == (0, 48)
