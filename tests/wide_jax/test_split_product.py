"""bfloat16 times float32 as bfloat16 products: float32 precision, in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels._common.bfloat16_parts import bfloat16_parts
from wide_jax import partition
from wide_jax.router import Router
from wide_jax.split_product import split_product


def arrays(rows=40, inner=96, columns=8):
    """Numbers of many sizes, so that small parts matter."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, rows, inner)) * 10.0 ** rng.integers(-3, 3, (2, rows, inner))
    weight = rng.normal(size=(columns, inner)) * 10.0 ** rng.integers(-3, 3, (columns, inner))
    pull = rng.normal(size=(2, rows, columns)) * 10.0 ** rng.integers(-3, 3, (2, rows, columns))
    return jnp.asarray(x, jnp.bfloat16), jnp.float32(weight), jnp.float32(pull)


def error(found, one, other):
    """The largest, relative to the sizes that are added up."""
    size = np.abs(one) @ np.abs(other)
    return np.max(np.abs(np.asarray(found, np.float64) - one @ other) / size)


@pytest.mark.parametrize("compiled", [False, True])
def test_three_parts_are_the_number(compiled):
    x = arrays()[1]
    parts = jax.jit(bfloat16_parts, static_argnums=1)(x, 3) if compiled else bfloat16_parts(x, 3)
    assert {part.dtype for part in parts} == {jnp.dtype(jnp.bfloat16)}
    total = sum(np.asarray(part, np.float64) for part in parts)
    assert np.array_equal(total, np.asarray(x, np.float64))
    two = sum(np.asarray(part, np.float64) for part in bfloat16_parts(x, 2))
    assert np.all(np.abs(two - np.asarray(x)) <= 2.0**-16 * np.abs(x))


def test_product_and_gradients_have_float32_precision():
    x, weight, pull = arrays()

    def loss(x, weight):
        return jnp.sum(split_product(x, weight) * pull)

    y = jax.jit(split_product)(x, weight)
    by_x, by_weight = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight)
    x64, w64, p64 = (np.asarray(a, np.float64) for a in (x, weight, pull))
    for found, one, other in (
        (y, x64, w64.T),
        (by_weight, p64.reshape(-1, 8).T, x64.reshape(-1, 96)),
    ):
        plain = jnp.matmul(jnp.float32(one), jnp.float32(other), precision="highest")
        # Both bounds are the product's: how XLA adds up the plain one differs between processors.
        assert error(found, one, other) <= 2 * error(plain, one, other)
        assert error(found, one, other) < 2.0**-20
    assert error(by_x, p64, w64) < 2.0**-8  # its own rounding
    assert (y.dtype, by_x.dtype, by_weight.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    # One bfloat16 product alone would fail these bounds by far.
    rough = x64 @ np.asarray(weight.astype(jnp.bfloat16), np.float64).T
    assert error(rough, x64, w64.T) > 2.0**-11


def test_a_routers_training_logits_are_its_inference_logits():
    router = Router(96, 8, 4, rngs=nnx.Rngs(0))
    x = arrays()[0]
    plain, training = router(x), router(x, training=True)
    np.testing.assert_allclose(training, plain, rtol=0, atol=2e-6 * float(jnp.abs(plain).max()))
    same = router(x.astype(jnp.float32), training=True)
    assert np.array_equal(same, plain)  # float32 models train as they did


def test_it_is_the_same_with_the_tokens_on_several_devices():
    x, weight, pull = arrays()

    def gradients(x, weight, pull):
        return jax.grad(lambda *a: jnp.sum(split_product(*a) * pull), argnums=(0, 1))(x, weight)

    alone = jax.jit(gradients)(x, weight, pull)
    mesh = partition.make_mesh(2, 1, 2)
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        placed = jax.device_put((x, weight, pull), (rows, whole, rows))
        spread = jax.jit(gradients)(*placed)
    assert np.array_equal(alone[0], spread[0])
    x64, p64 = (np.asarray(a, np.float64) for a in (x, pull))
    assert error(spread[1], p64.reshape(-1, 8).T, x64.reshape(-1, 96)) < 2.0**-20
