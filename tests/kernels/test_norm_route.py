"""`norm_route`: norm and decisions equal float64 ones, whatever the form that runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import RouterWeights, norm_route, norm_route_step, step_counter
from pallas_kernels._common.cubin import TYPE_NAMES, compile_usage
from pallas_kernels._common.device import KNOWN_DEVICES
from pallas_kernels.norm_route.api import is_step
from pallas_kernels.norm_route.triton import (
    NUM_STAGES,
    NUM_WARPS,
    finish_constants,
    finish_rows_kernel,
    split,
    step_constants,
    step_kernel,
    sum_constants,
    sum_rows_kernel,
)
from tests.kernels.contract import ON_GPU, running

EPS = 1e-5
SHAPES = [  # M, D, R, groups: both forms, sizes that are no power of two
    (1, 576, 32, 9),
    (5, 128, 16, 112),
    (16, 48, 16, 9),
    (9, 48, 128, 9),  # too many programs for a step
    (1, 64, 128, 70),  # more groups than a step decides at once
    (3, 64, 16, 130),
    (2, 4128, 4, 3),  # more channels than a step's program asks for at once
    (4, 576, 32, 24),
    (64, 64, 8, 3),
    (8, 192, 20, 40),
    (65, 576, 32, 24),
    (130, 192, 20, 40),
    (70, 48, 16, 5),  # one slice of the channels
    (520, 300, 32, 140),  # blocks of 64 tokens, in two rounds of groups, the last piece ragged
]
if ON_GPU:
    SHAPES += [(1, 4096, 32, 112), (16384, 4096, 32, 112), (4097, 5120, 16, 8), (16, 4096, 32, 8)]
    SHAPES += [(4, 5120, 32, 40)]
    SHAPES += [(128, 4096, 32, 112), (1000, 4096, 32, 112), (8192, 4096, 128, 8)]


def operands(m, hidden, rank, groups, dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    x = (3 * jax.random.normal(keys[0], (m, hidden))).astype(dtype)
    norm = (1 + 0.1 * jax.random.normal(keys[1], (hidden,))).astype(dtype)
    weights = RouterWeights(
        jax.random.normal(keys[2], (rank, hidden)) / hidden**0.5,
        jax.random.normal(keys[3], (rank,)),
        jax.random.normal(keys[4], (2 * groups, rank)) / rank**0.5,
        jax.random.normal(keys[5], (2 * groups,)),
    )
    return x, norm, weights


def exact(x, norm, weights):
    """Normed values and margins in float64."""
    x, norm = np.asarray(x, np.float64), np.asarray(norm, np.float64)
    compressor, first, router, second = (np.asarray(w, np.float64) for w in weights)
    normed = norm * x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    logits = (x @ compressor.T + first) @ router.T + second
    return normed, logits[:, 0::2] - logits[:, 1::2]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_decisions(shape, dtype, implementation):
    x, norm, weights = operands(*shape, dtype)
    normed, margin = exact(x, norm, weights)
    with running(implementation):
        got, mask = norm_route(x, norm, weights, eps=EPS, implementation=implementation)
    assert got.dtype == x.dtype
    tolerance = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 2e-6}[dtype]  # 2 roundings
    np.testing.assert_allclose(np.asarray(got, np.float64), normed, rtol=tolerance, atol=1e-6)
    # Float32 sums decide as exact ones do, except where the margin is itself a rounding error.
    decided = np.abs(margin) > 1e-4
    assert decided.mean() > 0.999
    np.testing.assert_array_equal(np.asarray(mask)[decided], (margin >= 0)[decided])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("m", [3, 70])
def test_ties_execute_and_the_threshold_moves_them(m, implementation):
    x, norm, weights = operands(m, 64, 8, 3, "float32")
    zeros = RouterWeights(*(jnp.zeros_like(w) for w in weights))
    for threshold, expected in ((0.0, True), (1e-3, False), (-1e-3, True)):
        with running(implementation):
            _, mask = norm_route(
                x, norm, zeros, eps=EPS, threshold=threshold, implementation=implementation
            )
        assert (np.asarray(mask) == expected).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("m", [2, 66])
def test_a_token_does_not_depend_on_its_neighbours(m, implementation):
    """NaN in other tokens stays there: padding may hold anything."""
    x, norm, weights = operands(m, 96, 16, 5, "float32")
    with running(implementation):
        whole, mask = norm_route(x, norm, weights, eps=EPS, implementation=implementation)
        spoiled, spoiled_mask = norm_route(
            x.at[0].set(jnp.nan), norm, weights, eps=EPS, implementation=implementation
        )
    np.testing.assert_array_equal(whole[1:], spoiled[1:])
    np.testing.assert_array_equal(mask[1:], spoiled_mask[1:])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("m", [1, 4, 16, 17, 65])
def test_a_counter_serves_call_after_call(m, implementation):
    x, norm, weights = operands(m, 96, 8, 5, "float32")
    with running(implementation):
        wanted = norm_route(x, norm, weights, eps=EPS, implementation=implementation)
        counter = step_counter()
        for _ in range(3):
            *got, counter = norm_route_step(
                x, norm, weights, counter, eps=EPS, implementation=implementation
            )
            for ours, theirs in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            assert not counter.any()


@pytest.mark.usefixtures("unchecked_types")
def test_no_tokens_and_refusals():
    x, norm, weights = operands(2, 64, 8, 3, "bfloat16")
    normed, mask = norm_route(x[:0], norm, weights, eps=EPS)
    assert normed.shape == (0, 64)
    assert mask.shape == (0, 3)
    with pytest.raises(ValueError, match=r"norm_weight is bfloat16\[63\]"):
        norm_route(x, norm[:63], weights, eps=EPS)
    with pytest.raises(ValueError, match=r"compressor is float32\[8, 64\], expected"):
        norm_route(x[:, :32], norm[:32], weights, eps=EPS)
    with pytest.raises(ValueError, match="unknown implementation"):
        norm_route(x, norm, weights, eps=EPS, implementation="cuda")
    with pytest.raises(ValueError, match=r"counter is int32\[1\], expected int32\[16\]"):
        norm_route_step(x, norm, weights, jnp.zeros((1,), jnp.int32), eps=EPS)
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match="needs a CUDA device"):
            norm_route(x, norm, weights, eps=EPS, implementation="triton")


def kernels_of(m, hidden, rank, dtype):
    """The kernels that M tokens run, with their constants."""
    _, _, weights = operands(1, hidden, rank, 112, dtype)
    if is_step(m, rank):
        return {step_kernel: step_constants(hidden, weights, EPS, 0.0)}
    sums = sum_constants(m, hidden, dtype, rank)
    finish = finish_constants(hidden, sums["SLICES"], weights, EPS, 0.0)
    return {sum_rows_kernel: sums, finish_rows_kernel: finish}


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("m", [1, 17, 1024, 4096, 65536])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compile_without_spills(device, dtype, m):
    kind = TYPE_NAMES[dtype]
    kinds = dict.fromkeys(("x", "norm_weight", "normed"), kind)
    floats = ("compressor_bias", "router", "router_bias", "squares", "z")
    kinds |= dict.fromkeys(floats, "*fp32") | {"mask": "*i1", "M": "i32", "arrived": "*i32"}
    for rank in (32, 128):
        for kernel, constants in kernels_of(m, 4096, rank, dtype).items():
            kinds["compressor"] = kind if constants.get("AHEAD") else "*fp32"
            signature = {name: kinds[name] for name in kernel.arg_names if name not in constants}
            found = compile_usage(
                kernel, signature, constants, device.capability, NUM_WARPS, NUM_STAGES
            )
            assert found.spills == 0
            assert found.shared_memory <= device.shared_memory_per_block
            assert "red." not in found.instructions
            if kernel is not step_kernel:  # its one atomic counts programs, and adds nothing up
                assert "atom." not in found.instructions


@pytest.mark.parametrize("m", [5, 64, 128, 1000, 4096, 8191, 16384, 131072])
@pytest.mark.parametrize("hidden", [64, 576, 4096, 5120])
def test_slices_cover_all_channels_once(m, hidden):
    for dtype in ("bfloat16", "float32"):
        sums = sum_constants(m, hidden, dtype, 32)
        assert sums["SLICE"] % sums["BLOCK_D"] == 0
        assert (sums["SLICES"] - 1) * sums["SLICE"] < hidden <= sums["SLICES"] * sums["SLICE"]
        assert sums["SLICES"] <= 16


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
def test_a_step_of_a_high_rank_holds_fewer_groups(device):
    """Loaded ahead, 128 groups of rank 128 would take all registers and spill."""
    _, _, weights = operands(1, 4096, 128, 112, "bfloat16")
    constants = step_constants(4096, weights, EPS, 0.0)
    kinds = {"mask": "*i1", "arrived": "*i32"}
    kinds |= dict.fromkeys(("x", "norm_weight", "normed"), TYPE_NAMES["bfloat16"])
    signature = {
        name: kinds.get(name, "*fp32") for name in step_kernel.arg_names if name not in constants
    }
    found = compile_usage(step_kernel, signature, constants, device.capability, NUM_WARPS, 3)
    assert found.spills == 0


def test_three_parts_are_the_weight():
    w = jax.random.normal(jax.random.key(0), (8, 64)) * 10.0 ** jnp.arange(-3, 5)[:, None]
    parts = np.asarray(jax.jit(split)(w), np.float64)
    np.testing.assert_allclose(parts.sum(axis=0), np.asarray(w, np.float64), rtol=2**-24)
