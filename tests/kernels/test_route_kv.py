"""`route_kv`: what `norm_route` and the products of what it norms give, from one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import RouterWeights, norm_route, route_kv, step_counter
from pallas_kernels._common.cubin import TYPE_NAMES, compile_usage
from pallas_kernels._common.device import KNOWN_DEVICES
from pallas_kernels._common.testing import relative_error
from pallas_kernels.route_kv.triton import kernel_constants, num_warps, route_kv_kernel
from tests.kernels.contract import ON_GPU, poison_memory, running

EPS = 1e-5
NAMES = ("normed", "mask", "k", "v", "counter")
SHAPES = [  # D, Nk, R, groups: heads of 64, 16, 12 and 48 channels, sizes that are no power of two
    (576, 192, 32, 3),
    (64, 16, 16, 4),
    (100, 36, 8, 3),
    (136, 48, 20, 40),
]
if ON_GPU:
    SHAPES += [(4096, 1024, 32, 8), (5120, 1024, 16, 40), (896, 128, 32, 14)]


def operands(shape, dtype, seed=0):
    hidden, channels, rank, groups = shape
    rng = np.random.default_rng(seed)

    def draw(*size, scale=1.0, kind=dtype):
        return jnp.asarray(scale * rng.standard_normal(size, np.float32), kind)

    weights = RouterWeights(
        draw(rank, hidden, scale=hidden**-0.5, kind="float32"),
        draw(rank, kind="float32"),
        draw(2 * groups, rank, scale=rank**-0.5, kind="float32"),
        draw(2 * groups, kind="float32"),
    )
    x, norm = draw(1, hidden, scale=3.0), 1 + draw(hidden, scale=0.1)
    w_k, w_v = (draw(channels, hidden, scale=hidden**-0.5) for _ in range(2))
    return (x, norm, weights, w_k, w_v), (draw(channels), draw(channels))


def run(arrays, implementation, counter=None, **options):
    counter = step_counter() if counter is None else counter
    with running(implementation):
        return route_kv(*arrays, counter, eps=EPS, implementation=implementation, **options)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_norm_the_decision_and_two_products(shape, dtype, biased):
    """As near to exact values as the reference is, which rounds where the model does."""
    arrays, biases = operands(shape, dtype)

    def outputs(implementation, kind=dtype):
        x, norm, weights, *kv = arrays
        x, norm, *kv = (a.astype(kind) for a in (x, norm, *kv))
        wide = tuple(b.astype(kind) for b in biases) if biased else None
        return run((x, norm, weights, *kv), implementation, biases=wide)

    poison_memory()
    got, wanted, exact = outputs("triton"), outputs("reference"), outputs("reference", "float32")
    assert not got[-1].any()
    for name, ours, theirs, true in zip(NAMES, got, wanted, exact, strict=True):
        assert ours.shape == theirs.shape, name
        assert ours.dtype == theirs.dtype, name
        if name in ("mask", "counter"):
            np.testing.assert_array_equal(ours, theirs)
        else:
            allowed = 1.5 * relative_error(theirs, true) + 2e-6
            assert relative_error(ours, true) < allowed, name


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_products_are_of_the_normed_values(implementation):
    """Against float64, from the float32 reference's own normed values."""
    (x, norm, weights, w_k, w_v), (b_k, b_v) = operands(SHAPES[0], "float32")
    normed, mask = norm_route(x, norm, weights, eps=EPS, implementation="reference")
    got = run((x, norm, weights, w_k, w_v), implementation, biases=(b_k, b_v))
    np.testing.assert_array_equal(got[1], mask)
    for y, w, b in ((got[2], w_k, b_k), (got[3], w_v, b_v)):
        wanted = np.asarray(normed, np.float64) @ np.asarray(w, np.float64).T + np.asarray(b)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_the_counter_serves_call_after_call():
    counter, wanted = None, None
    for seed in (1, 2, 1):
        *got, counter = run(operands(SHAPES[1], "float32", seed)[0], "triton", counter)
        assert not counter.any()
        wanted = got if wanted is None else wanted
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_decision_does_not_bear_on_keys_and_values():
    """Whatever the threshold, NaN in a router's weights: it decides, and nothing else changes."""
    (x, norm, weights, w_k, w_v), _ = operands(SHAPES[1], "float32")
    spoiled = RouterWeights(*(jnp.full_like(w, jnp.nan) for w in weights))
    for threshold, expected in ((-1e9, True), (1e9, False)):
        normed, mask, k, v, _ = run((x, norm, weights, w_k, w_v), "triton", threshold=threshold)
        assert (np.asarray(mask) == expected).all()
        other = run((x, norm, spoiled, w_k, w_v), "triton", threshold=threshold)
        assert not np.asarray(other[1]).any()  # NaN is not above any threshold
        for ours, theirs in zip((normed, k, v), (other[0], *other[2:4]), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    row = w_k.at[3].set(jnp.nan)  # a channel does not reach its neighbours
    _, _, k_spoiled, v_spoiled, _ = run((x, norm, weights, row, w_v), "triton")
    assert np.isnan(k_spoiled[0, 3])
    np.testing.assert_array_equal(np.delete(k_spoiled, 3), np.delete(k, 3))
    np.testing.assert_array_equal(v_spoiled, v)


@pytest.mark.usefixtures("unchecked_types")
def test_refusals():
    (x, norm, weights, w_k, w_v), (b_k, b_v) = operands(SHAPES[1], "float32")
    counter = step_counter()

    def call(x=x, norm=norm, weights=weights, w_k=w_k, w_v=w_v, **options):
        return route_kv(x, norm, weights, w_k, w_v, counter, eps=EPS, **options)

    with pytest.raises(ValueError, match="route_kv: one token, got 2"):
        call(x=jnp.concatenate([x, x]))
    with pytest.raises(ValueError, match=r"route_kv: norm_weight is float32\[63\]"):
        call(norm=norm[:63])
    with pytest.raises(ValueError, match=r"route_kv: w_v is float32\[16, 63\], expected"):
        call(w_v=w_v[:, 1:])
    with pytest.raises(ValueError, match=r"route_kv: bias is float32\[15\], expected"):
        call(biases=(b_k, b_v[1:]))
    with pytest.raises(ValueError, match="unknown implementation"):
        call(implementation="cuda")
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match="needs a CUDA device"):
            call(implementation="triton")


def test_its_result_has_no_derivative_and_no_batch_axis():
    (x, *rest), _ = operands(SHAPES[1], "float32")
    with pytest.raises(NotImplementedError, match="route_kv_kernel has no derivative"):
        jax.grad(lambda x: run((x, *rest), "triton")[2].sum())(x)
    with pytest.raises(NotImplementedError, match="route_kv_kernel updates buffers in place"):
        jax.vmap(lambda x: run((x, *rest), "triton"))(jnp.stack([x, x]))


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bfloat16", (4096, 1024, 32, 8)),
        ("bfloat16", (4096, 1024, 32, 32)),  # a group a head
        ("bfloat16", (4096, 1024, 128, 32)),  # a router of high rank
        ("bfloat16", (5120, 1024, 32, 40)),
        ("float32", (2048, 512, 32, 8)),
        ("bfloat16", (576, 192, 32, 3)),
    ],
    ids=str,
)
def test_the_kernel_compiles_without_spills(device, dtype, shape):
    hidden, channels, rank, groups = shape
    sizes = ((rank, hidden), (rank,), (2 * groups, rank), (2 * groups,))
    weights = RouterWeights(*(jnp.zeros(size, jnp.float32) for size in sizes))
    constants = kernel_constants(jnp.zeros((1, hidden), dtype), weights, channels, True, EPS, 0.0)
    kinds = dict.fromkeys(
        ("x", "norm_weight", "w_k", "w_v", "b_k", "b_v", "normed", "k", "v"), TYPE_NAMES[dtype]
    )
    kinds |= {"mask": "*i1", "arrived": "*i32"}
    signature = {
        name: kinds.get(name, "*fp32")
        for name in route_kv_kernel.arg_names
        if name not in constants
    }
    found = compile_usage(
        route_kv_kernel, signature, constants, device.capability, num_warps(hidden), 1
    )
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block
    if shape == (4096, 1024, 32, 8):
        # So that a multiprocessor holds four programs: half of its share is on the way at once.
        assert found.registers <= 64
