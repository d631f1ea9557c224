"""`triton_support.launch`: what every Triton kernel relies on when it is called on a GPU."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import triton_support
from pallas_kernels._common.jit import jit
from pallas_kernels._common.masking import clear_skipped
from pallas_kernels._common.testing import random_mask
from pallas_kernels._common.triton_gemm import zero_skipped
from tests.kernels.contract import running


@jit
def _kernel(counter, x, y, z):
    """Only its name is used here."""


@pytest.fixture
def calls(monkeypatch):
    """The (outputs, aliases) of every call; output i is full of i."""
    found = []

    def triton_call(*arrays, out_type, input_output_aliases, **_):
        found.append((out_type, input_output_aliases))
        return [jnp.full(o.shape, i, o.dtype) for i, o in enumerate(out_type)]

    module = types.SimpleNamespace(triton_call=triton_call)
    monkeypatch.setattr(triton_support, "load", lambda: module)
    return found


def launch(counter, x):
    y, z = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    options = dict(grid=1, constants={}, num_warps=4, num_stages=1)
    return triton_support.launch(_kernel, [x], [], [y, z], in_place=[counter], **options)


def test_updated_buffers_are_the_last_outputs_of_the_call(calls):
    """The call gives a kernel its inputs and then its outputs from the first on: an aliased output
    in front of the others would be written as if it were one of them (seen on a card)."""
    counter, first, second = launch(jnp.zeros((1,), jnp.int32), jnp.ones(5))
    (out_type, aliases) = calls[0]
    assert [o.shape for o in out_type] == [(3,), (4,), (1,)]
    assert aliases == {0: 2}
    assert counter.dtype == jnp.int32
    for found, wanted in ((counter, [2]), (first, [0] * 3), (second, [1] * 4)):
        np.testing.assert_array_equal(found.astype(jnp.int32), wanted)


@pytest.mark.usefixtures("calls")
def test_a_call_that_updates_buffers_refuses_a_batch_axis():
    """In the loop over a batch its update was lost on a card."""
    with pytest.raises(NotImplementedError, match="_kernel updates buffers in place"):
        jax.vmap(launch)(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 5)))


@pytest.mark.parametrize(
    ("m", "n", "group_size"),
    [(70, 512, 32), (70, 500, 48), (65, 96, 96), (130, 1040, 520), (3, 64, 16)],
    ids=str,
)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_clearing_is_a_selection(m, n, group_size, sparsity):
    """It is `where(mask, y, 0)`: NaN goes too, and kept values stay as they are."""
    mask = random_mask(jax.random.key(m), m, -(-n // group_size), sparsity)
    y = jax.random.normal(jax.random.key(1), (m, n)).at[0].set(jnp.nan)
    with running("triton"):
        got = zero_skipped(y, mask, group_size)
        chosen = clear_skipped(y, mask, group_size)
    wanted = np.where(np.repeat(mask, group_size, axis=1)[:, :n], y, 0.0)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(chosen, wanted)
