"""The contract suite: one set of checks for every op and implementation (see contract.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels._common.testing import PATTERNS, random_mask
from tests.kernels.cases import GROUPED, PATTERN_SHAPE, TOKENS
from tests.kernels.contract import IMPLEMENTATIONS, ON_GPU, Shape, check, poison_memory, running
from tests.kernels.ops import BARE_OPS, OPS, OUTPUT_PRUNED
from tests.kernels.output_pruned import OutputPruned

DTYPES = ("bfloat16", "float16", "float32")
KEY = jax.random.key(20)

each_op = pytest.mark.parametrize("op", OPS, ids=str)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def half(op, shape: Shape) -> jax.Array:
    return random_mask(KEY, shape.m, op.groups(shape), 0.5)


@each_op
@each_implementation
@pytest.mark.parametrize("pattern", PATTERNS)
def test_mask_patterns(op, implementation, pattern):
    mask = PATTERNS[pattern](KEY, PATTERN_SHAPE.m, op.groups(PATTERN_SHAPE))
    check(op, implementation, PATTERN_SHAPE, "bfloat16", mask)


@pytest.mark.parametrize(
    ("op", "shape", "config"),
    [(op, shape, config) for op in OPS for shape, config in op.own_configs()],
    ids=str,
)
@pytest.mark.parametrize("pattern", ["half", "few", "ragged", "last_tile_partial", "all_off"])
def test_configs_change_speed_only(op, shape, config, pattern):
    mask = PATTERNS[pattern](KEY, shape.m, op.groups(shape))
    check(op, "triton", shape, "bfloat16", mask, config)


@each_op
@each_implementation
@pytest.mark.parametrize("tokens", TOKENS)
def test_token_counts(op, implementation, tokens):
    shape = Shape(tokens, 64, 64, 32)
    check(op, implementation, shape, "bfloat16", half(op, shape))


@each_op
@each_implementation
@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_group_sizes(op, implementation, shape):
    check(op, implementation, shape, "bfloat16", half(op, shape))


@each_op
@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 20, 80])
def test_dtypes(op, implementation, dtype, tokens):
    shape = Shape(tokens, 64, 96, 32)
    check(op, implementation, shape, dtype, half(op, shape))


@each_implementation
@pytest.mark.parametrize(
    ("op", "shape"),
    [(op, shape) for op in BARE_OPS for shape in op.model_shapes()],
    ids=str,
)
def test_model_shapes(op, implementation, shape):
    check(op, implementation, shape, "bfloat16", half(op, shape))


@each_op
@each_implementation
@pytest.mark.parametrize("tokens", [1, 20, 150])
def test_full_mask_equals_one_dense_group(op, implementation, tokens):
    """All groups on is the dense product, whatever the grouping: bit for bit."""
    shape = Shape(tokens, 96, 72, 32)
    operands = op.operands(shape, "float32")
    layout = pallas_kernels.mask_layout(
        jnp.ones((tokens, op.groups(shape)), bool), implementation="xla"
    )
    with_groups = op(operands, layout, shape, implementation)
    again = op(operands, layout, shape, implementation)
    np.testing.assert_array_equal(with_groups, again)
    exact = op.exact(operands, layout, shape)
    np.testing.assert_allclose(with_groups, exact, rtol=2e-5, atol=2e-5)


@each_op
@each_implementation
@pytest.mark.parametrize("tokens", [1, 20, 150])
def test_nan_of_skipped_work_does_not_leak(op, implementation, tokens):
    """A token that skips everything may hold NaN, and a group nobody runs may have NaN weights."""
    shape = Shape(tokens, 96, 72, 32)
    mask = half(op, shape).at[:, 1].set(False).at[tokens // 2].set(False)
    operands = op.operands(shape, "bfloat16")
    clean = op(operands, pallas_kernels.mask_layout(mask), shape, implementation)
    operands = op.with_nan(operands, tokens // 2, 1, shape)
    y = op(operands, pallas_kernels.mask_layout(mask), shape, implementation)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(clean, np.float32))


@each_op
@each_implementation
@pytest.mark.parametrize("tokens", [1, 20, 150])
def test_no_stale_output_between_calls(op, implementation, tokens):
    """A call with everything on leaves nothing for the next, emptier one, nor the other way."""
    shape = Shape(tokens, 96, 72, 32)
    operands = op.operands(shape, "bfloat16")

    @jax.jit
    def run(mask):
        return op(operands, pallas_kernels.mask_layout(mask), shape, implementation)

    masks = [
        jnp.ones((tokens, op.groups(shape)), bool),
        jnp.zeros((tokens, op.groups(shape)), bool),
        half(op, shape),
    ]
    first = [np.asarray(run(mask), np.float32) for mask in masks]
    poison_memory()
    second = [np.asarray(run(mask), np.float32) for mask in reversed(masks)][::-1]
    for a, b, mask in zip(first, second, masks, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not a[op.zeros(mask, shape)].any()


@each_op
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_reruns_are_bit_identical(op, implementation):
    shape = Shape(90, 96, 72, 32)
    operands = op.operands(shape, "bfloat16")
    layout = pallas_kernels.mask_layout(half(op, shape))
    first = np.asarray(op(operands, layout, shape, implementation), np.float32)
    for _ in range(100 if ON_GPU else 2):
        again = np.asarray(op(operands, layout, shape, implementation), np.float32)
        np.testing.assert_array_equal(first, again)


@each_op
@each_implementation
def test_one_layout_serves_ops_of_different_widths(op, implementation):
    """The layout holds token order only: one serves every op of a sublayer, also under jit."""
    mask = random_mask(KEY, 90, 3, 0.5)
    layout = pallas_kernels.mask_layout(mask)
    for width in (16, 32):
        shape = op.shape(90, groups=3, group=width, other=48)
        operands = op.operands(shape, "bfloat16")
        outside = op(operands, layout, shape, implementation)
        inside = jax.jit(lambda a, b, s=shape: op(a, b, s, implementation))(operands, layout)
        np.testing.assert_array_equal(
            np.asarray(outside, np.float32), np.asarray(inside, np.float32)
        )


@each_op
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_differentiating_a_kernel_raises(op, implementation):
    shape = op.shape(20, groups=2, group=32, other=48)
    operands = op.operands(shape, "float32")
    layout = pallas_kernels.mask_layout(half(op, shape))

    def loss(x):
        return op.call((x, *operands[1:]), layout, shape, implementation).sum()

    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(loss)(operands[0])


@each_op
@each_implementation
@pytest.mark.parametrize("tokens", [1, 80])
def test_case_E9_vmap_equals_a_loop(op, implementation, tokens):
    shape = op.shape(tokens, groups=2, group=32, other=48)
    operands = op.operands(shape, "float32")
    xs = jnp.stack([operands[0], 2 * operands[0], operands[0] + 1])
    masks = jnp.stack([random_mask(jax.random.key(i), tokens, 2, 0.5) for i in range(3)])

    def run(x, mask):
        layout = pallas_kernels.mask_layout(mask, implementation="xla")
        return op.call((x, *operands[1:]), layout, shape, implementation)

    looped = jnp.stack([run(x, mask) for x, mask in zip(xs, masks, strict=True)])
    # A GPU's library takes another kernel for the batch, which adds up in another order.
    tolerance = 1e-5 if implementation == "dense" else 1e-6
    with running(implementation):
        batched = jax.vmap(run)(xs, masks)
    np.testing.assert_allclose(batched, looped, rtol=tolerance, atol=tolerance)


@each_op
@each_implementation
def test_case_E1_ragged_in_every_direction(op, implementation):
    """M=33, N=257, K=100 in groups of 48, x's memory followed by NaN; ten equal calls."""
    shape = Shape(33, 257, 100, 48)
    x, *rest = op.operands(shape, "bfloat16")
    larger = jnp.full((64, 100), jnp.nan, x.dtype).at[:33].set(x)
    layout = pallas_kernels.mask_layout(half(op, shape))
    exact = np.asarray(op.exact((x, *rest), layout, shape))
    results = []
    for _ in range(10 if implementation != "pallas" or ON_GPU else 2):
        poison_memory(1 << 20)
        y = op((larger[:33], *rest), layout, shape, implementation)
        results.append(np.asarray(y, np.float32))
    assert np.abs(results[0] - exact).max() <= 2e-2 * max(1.0, np.abs(exact).max())
    for again in results[1:]:
        np.testing.assert_array_equal(results[0], again)


@each_op
@each_implementation
@pytest.mark.parametrize("sizes", [(8, 0, 8, 0), (0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 200)])
def test_case_E4_empty_groups(op, implementation, sizes):
    tokens = max(*sizes, 16)
    mask = jnp.stack([jnp.arange(tokens) < size for size in sizes], axis=1)
    shape = op.shape(tokens, groups=4, group=8, other=64)
    check(op, implementation, shape, "bfloat16", mask)


@each_op
@each_implementation
def test_case_E4_no_tokens_is_no_launch(op, implementation):
    shape = op.shape(0, groups=2, group=32, other=48)
    layout = pallas_kernels.mask_layout(jnp.zeros((0, 2), bool))
    y = op(op.operands(shape, "bfloat16"), layout, shape, implementation)
    assert y.shape == (0, shape.n)


@pytest.mark.parametrize("op", OUTPUT_PRUNED, ids=str)
@each_implementation
@pytest.mark.usefixtures("unchecked_types")
def test_misfits_are_refused_with_numbers(op, implementation):
    shape = Shape(20, 64, 48, 32)
    x, *rest = op.operands(shape, "bfloat16")
    layout = pallas_kernels.mask_layout(half(op, shape))
    w = rest[0]
    others = rest[1:]

    def call(x, w, layout=layout, shape=shape):
        return op.call((x, w, *others), layout, shape, implementation)

    with pytest.raises(ValueError, match="20 tokens, x has 19"):
        call(x[:19], w)
    with pytest.raises(ValueError, match="47"):
        call(x, w[:, :47])
    with pytest.raises(ValueError, match="float16"):
        call(x, w.astype(jnp.float16))
    with pytest.raises(ValueError, match="are 4, but the layout has 2"):
        call(x, w, shape=Shape(20, 64, 48, 16))
    with pytest.raises(ValueError, match="int32"):
        call(x.astype(jnp.int32), w)


@pytest.mark.parametrize("op", [OutputPruned("gemm_mn", 1), OutputPruned("swiglu_up", 2)], ids=str)
@pytest.mark.usefixtures("unchecked_types")
def test_groups_must_divide_outputs_or_be_given(op):
    shape = Shape(20, 65, 48, 32)
    operands = op.operands(shape, "bfloat16")
    layout = pallas_kernels.mask_layout(jnp.ones((20, 3), bool))
    function = getattr(pallas_kernels, op.name)
    with pytest.raises(ValueError, match="3 groups do not divide 65"):
        function(*operands, layout)
    assert function(*operands, layout, group_size=32).shape == (20, 65)
    with pytest.raises(ValueError, match="unknown implementation='cuda'"):
        function(*operands, layout, group_size=32, implementation="cuda")
