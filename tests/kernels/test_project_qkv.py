"""`project_qkv`: q as `gemm_mn` gives it, k and v whole, in one kernel or three."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels._common.cubin import TYPE_NAMES, compile_usage
from pallas_kernels._common.device import KNOWN_DEVICES
from pallas_kernels._common.testing import PATTERNS, relative_error
from pallas_kernels.project_qkv import project_qkv
from pallas_kernels.project_qkv.triton import qkv_kernel
from tests.kernels.contract import ON_GPU, running

SHAPES = [(1, 48, 16, 32, 12), (5, 48, 16, 40, 16), (70, 32, 16, 24, 16)]  # M, N, NK, K, G
if ON_GPU:
    SHAPES += [(1, 4096, 1024, 4096, 512), (16, 4096, 1024, 4096, 512), (64, 896, 128, 896, 448)]


def operands(shape, dtype):
    m, n, nk, k, _ = shape
    keys = jax.random.split(jax.random.key(2), 7)
    sizes = [(m, k), (n, k), (nk, k), (nk, k), (n,), (nk,), (nk,)]
    made = [jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)]
    return [a.astype(dtype) for a in made[:4]], tuple(a.astype(dtype) for a in made[4:])


@pytest.mark.parametrize("implementation", ["reference", "dense", "triton"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_projections(shape, biased, implementation):
    m, n, _, _, group = shape
    (x, *weights), biases = operands(shape, "float32")
    for pattern in ("half", "all_off", "all_on"):
        mask = PATTERNS[pattern](jax.random.key(0), m, n // group)
        spoiled = (
            [weights[0].at[:group].set(jnp.nan), *weights[1:]] if pattern == "all_off" else weights
        )
        layout = pallas_kernels.mask_layout(mask, implementation="xla")
        with running(implementation), jax.default_matmul_precision("float32"):
            got = project_qkv(
                x,
                *spoiled,
                layout,
                biases=biases if biased else None,
                implementation=implementation,
            )
        for name, y, w, b in zip("qkv", got, weights, biases, strict=True):
            wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
            wanted = wanted + np.asarray(b, np.float64) if biased else wanted
            if name == "q":
                wanted = wanted * np.repeat(np.asarray(mask), group, axis=1)
            assert relative_error(y, jnp.asarray(wanted, "float32")) < 2e-6 or not wanted.any()
            if name == "q":
                assert not np.asarray(y)[~np.repeat(np.asarray(mask), group, axis=1)].any()


@pytest.mark.usefixtures("unchecked_types")
def test_misfits_are_refused_with_numbers():
    (x, w_q, w_k, w_v), _ = operands(SHAPES[1], "float32")
    layout = pallas_kernels.mask_layout(jnp.ones((5, 3), bool))
    with pytest.raises(ValueError, match=r"w_k is float32\[16, 39\], expected float32\[16, 40\]"):
        project_qkv(x, w_q, w_k[:, 1:], w_v, layout)
    with pytest.raises(ValueError, match="3 groups do not divide 47 outputs"):
        project_qkv(x, w_q[1:], w_k, w_v, layout)


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_kernel_compiles_without_spills(device, tokens):
    """With the tile sizes that the query projection has on that card."""
    choice = pallas_kernels.explain("gemm_mn", m=tokens, n=4096, k=4096, group=512, device=device)
    config = choice.config or pallas_kernels.dispatch.config_for(
        pallas_kernels.dispatch.Problem("gemm_mn", tokens, 4096, 4096, 512, "bfloat16"), device
    )
    kind = TYPE_NAMES["bfloat16"]
    names = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "q", "k", "v")
    signature = dict.fromkeys(names, kind) | {"mask": "*i1", "M": "i32"}
    signature = {name: signature[name] for name in qkv_kernel.arg_names if name in signature}
    constants = dict(
        N=4096,
        NK=1024,
        K=4096,
        G=512,
        GROUPS=8,
        HAS_BIAS=True,
        PRECISION="tf32",
        TOKENS=tokens,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
    )
    found = compile_usage(
        qkv_kernel, signature, constants, device.capability, config.num_warps, config.num_stages
    )
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block
