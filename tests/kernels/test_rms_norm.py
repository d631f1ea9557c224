"""`rms_norm`: equal to float64, row by row, whatever runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm
from pallas_kernels._common.cubin import TYPE_NAMES, compile_usage
from pallas_kernels._common.device import KNOWN_DEVICES
from pallas_kernels.rms_norm.triton import norm_kernel, num_warps
from tests.kernels.contract import ON_GPU, running

EPS = 1e-5
SHAPES = [(1, 576), (3, 64), (70, 100)]
if ON_GPU:
    SHAPES += [(1, 4096), (16384, 4096), (4097, 5120)]
each_implementation = pytest.mark.parametrize("implementation", ["reference", "triton"])


@each_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape, dtype, implementation):
    keys = jax.random.split(jax.random.key(0))
    x = (3 * jax.random.normal(keys[0], shape)).astype(dtype)
    weight = (1 + 0.1 * jax.random.normal(keys[1], shape[1:])).astype(dtype)
    with running(implementation):
        got = rms_norm(x, weight, eps=EPS, implementation=implementation)
    assert got.dtype == x.dtype
    exact, w = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    exact = w * exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPS)
    tolerance = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 2e-6}[dtype]  # 2 roundings
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=tolerance, atol=1e-6)


@each_implementation
def test_a_row_does_not_depend_on_others_and_none_is_no_launch(implementation):
    x, weight = jax.random.normal(jax.random.key(0), (5, 96)), jnp.ones(96)
    with running(implementation):
        whole = rms_norm(x, weight, eps=EPS, implementation=implementation)
        spoiled = rms_norm(x.at[0].set(jnp.nan), weight, eps=EPS, implementation=implementation)
        nothing = rms_norm(x[:0], weight, eps=EPS, implementation=implementation)
    np.testing.assert_array_equal(whole[1:], spoiled[1:])
    assert nothing.shape == (0, 96)


@pytest.mark.usefixtures("unchecked_types")
def test_refusals_name_the_numbers():
    x = jnp.ones((2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"weight is bfloat16\[63\], expected bfloat16\[64\]"):
        rms_norm(x, jnp.ones(63, jnp.bfloat16), eps=EPS)
    with pytest.raises(ValueError, match=r"x must be \[M, D\].*int32\[2, 64\]"):
        rms_norm(x.astype(jnp.int32), x[0], eps=EPS)
    with pytest.raises(ValueError, match="unknown implementation"):
        rms_norm(x, x[0], eps=EPS, implementation="cuda")


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("hidden", [576, 4096, 16384])
def test_kernel_compiles_without_spills(device, hidden):
    signature = dict.fromkeys(("x", "weight", "out"), TYPE_NAMES["bfloat16"])
    block = 1 << (hidden - 1).bit_length()
    constants = dict(D=hidden, EPS=EPS, BLOCK_D=block)
    found = compile_usage(
        norm_kernel, signature, constants, device.capability, num_warps(hidden), 1
    )
    assert found.spills == 0
