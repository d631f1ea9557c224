"""`mask_layout`: every implementation gives the reference's stable order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MaskLayout, mask_layout
from pallas_kernels._common.device import CPU, H200
from pallas_kernels._common.testing import PATTERNS, clustered_mask
from pallas_kernels.layout.api import default_layout_implementation
from tests.kernels.contract import ON_GPU, running

KEY = jax.random.key(4)
SHAPES = [(1, 1), (1, 112), (255, 3), (256, 16), (257, 17), (700, 9)]
if ON_GPU:
    SHAPES += [(16384, 112), (16384, 448), (131072, 8), (5000, 1)]
IMPLEMENTATIONS = ("reference", "xla", "pallas", "triton")


def expected(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    columns = [np.concatenate([np.flatnonzero(c), np.flatnonzero(~c)]) for c in mask.T]
    return np.stack(columns), mask.sum(axis=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_order_is_the_stable_partition(implementation, shape):
    for name in ("half", "all_on", "all_off", "ragged"):
        mask = PATTERNS[name](KEY, *shape)
        with running(implementation):
            layout = mask_layout(mask, implementation=implementation)
        order, count = expected(np.asarray(mask))
        np.testing.assert_array_equal(layout.order, order)
        np.testing.assert_array_equal(layout.count, count)
        np.testing.assert_array_equal(layout.mask, mask)


def test_layout_is_a_pytree_with_a_static_hint():
    layout = mask_layout(jnp.ones((4, 2), bool), expected_sparsity=0.25)
    doubled = jax.jit(lambda given: jax.tree.map(lambda a: a, given))(layout)
    assert isinstance(doubled, MaskLayout)
    assert doubled.expected_sparsity == 0.25
    assert (doubled.tokens, doubled.groups) == (4, 2)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(layout)]
    assert paths == [".mask", ".order", ".count"]
    with pytest.raises(AttributeError, match="cannot assign"):
        layout.count = None


def test_no_tokens():
    layout = mask_layout(jnp.zeros((0, 3), bool))
    assert layout.order.shape == (3, 0)
    np.testing.assert_array_equal(layout.count, [0, 0, 0])


@pytest.mark.usefixtures("unchecked_types")
def test_refusals():
    with pytest.raises(ValueError, match="2-D bool"):
        mask_layout(jnp.ones((4,), bool))
    with pytest.raises(ValueError, match="at least one group"):
        mask_layout(jnp.ones((4, 0), bool))
    with pytest.raises(ValueError, match=r"expected_sparsity=1\.5"):
        mask_layout(jnp.ones((4, 2), bool), expected_sparsity=1.5)
    with pytest.raises(ValueError, match="unknown implementation='sort'"):
        mask_layout(jnp.ones((4, 2), bool), implementation="sort")


def test_very_long_inputs_are_ordered_by_xla():
    assert default_layout_implementation(131_072, H200) == "triton"
    assert default_layout_implementation(131_073, H200) == "xla"
    assert default_layout_implementation(10, CPU) == "xla"
    with running("triton"), pytest.raises(NotImplementedError, match="up to 131072 tokens"):
        mask_layout(jnp.ones((131_073, 1), bool), implementation="triton")


@pytest.mark.skipif(ON_GPU, reason="there the kernels run")
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_a_kernel_named_on_a_cpu_raises(implementation):
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.0"):
        mask_layout(jnp.ones((4, 2), bool), implementation=implementation)


@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.75])
def test_clustered_masks_have_the_sparsity_asked_for(sparsity):
    mask = clustered_mask(KEY, 4096, 112, sparsity)
    assert abs(1.0 - float(mask.mean()) - sparsity) < 0.01
