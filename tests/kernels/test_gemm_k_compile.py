"""`gemm_k` compiles to machine code for the cards we cannot touch: no spills, no atomics."""

import re

import jax.numpy as jnp
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eval.kernel_cases import FAMILIES
from pallas_kernels import dispatch, mask_layout
from pallas_kernels._common.config import KTileConfig, SmallConfig
from pallas_kernels._common.cubin import Usage, compile_ttir_usage, compile_usage
from pallas_kernels._common.device import KNOWN_DEVICES, Device
from pallas_kernels.gemm_k.facts import for_pallas
from pallas_kernels.gemm_k.pallas import gemm_k
from pallas_kernels.layout.k_axis import FULL, TILE
from pallas_kernels.layout.k_axis_triton import (
    BLOCK_M,
    CHUNK,
    WARPS,
    k_count_kernel,
    k_place_kernel,
)
from tests.kernels.input_pruned import small_build, sum_build, tile_build
from tests.kernels.test_compile import pallas_kernels_of

each_device = pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
TENSOR_CORE = {"8.0": "mma.sync", "9.0": "wgmma.mma_async", "12.0": "mma.sync"}


def compiled(build, device: Device, warps: int, stages: int) -> Usage:
    found = compile_usage(*build, device.capability, warps, stages)
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block
    assert not found.instructions & {"red.", "atom."}
    return found


@each_device
@pytest.mark.parametrize("one_pass", [True, False], ids=["o", "down"])
def test_every_tile_the_tuner_tries(device, one_pass):
    """Bias and residual are added in the one-pass form: the larger of its two."""
    group = 512 if one_pass else 128
    family = FAMILIES["gemm_k_o" if one_pass else "gemm_k"]
    candidates = family.make(4096, group, "llama-3.1-8b").candidates(device)
    tiles = {c.__class__(*_tile(c)): c for c in candidates if isinstance(c, KTileConfig)}
    for config in tiles.values():
        found = compiled(
            tile_build(config, "bfloat16", one_pass=one_pass, extra=one_pass),
            device,
            config.num_warps,
            config.num_stages,
        )
        assert {TENSOR_CORE[device.capability], "cp.async.cg"} <= found.instructions
        problem = dispatch.Problem("gemm_k", 4096, 4096, 14336, 128, "bfloat16")
        modelled = dispatch.facts("gemm_k").shared_memory_bytes(config, problem, device.capability)
        # The write-back is staged beside the operands, a quarter or a half of a tile at a time.
        assert found.shared_memory <= modelled + TILE * 64 * 2 + 4096


def _tile(config: KTileConfig) -> tuple[int, int, int, int]:
    """Band and column tiles are numbers in the code, not shapes: one of a kind is enough."""
    return config.block_n, config.block_k, config.num_warps, config.num_stages


@each_device
@pytest.mark.parametrize("tokens", [1, 64])
def test_every_small_form_the_tuner_tries(device, tokens):
    for config in FAMILIES["gemm_k"].make(tokens, 128, "llama-3.1-8b").candidates(device):
        assert isinstance(config, SmallConfig)
        build = small_build(config, "bfloat16", tokens)
        compiled(build, device, config.num_warps, config.num_stages)


@each_device
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_configs_from_shapes_alone(device, dtype, tokens):
    problem = dispatch.Problem("gemm_k", tokens, 4096, 14336, 128, dtype)
    config = dispatch.default_config(problem, device.shared_memory_per_block, device.capability)
    if isinstance(config, SmallConfig):
        build = small_build(config, dtype, tokens)
    else:
        build = tile_build(config, dtype, one_pass=False)
    compiled(build, device, config.num_warps, config.num_stages)


@each_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_of_partial_sums(device, dtype):
    compiled(sum_build(dtype), device, 4, 1)


@each_device
@pytest.mark.parametrize("size", [4, 7, 8])
def test_the_order_of_the_k_axis(device, size):
    mask = dict(mask="*i1", count="*i32", M="i32", blocks="i32")
    constants = dict(GROUPS=112, SIZE=size, PATTERNS=1 << size, BLOCK_M=BLOCK_M, CHUNK=CHUNK)
    compiled((k_count_kernel, mask | dict(partial="*i32"), constants), device, WARPS, 1)
    signature = mask | dict(partial="*i32", tiles="i32", rows_out="*i32", tiles_out="*i32")
    constants |= dict(TILE=TILE, FULL=FULL)
    compiled((k_place_kernel, signature, constants), device, WARPS, 1)


@each_device
def test_the_pallas_form(device):
    """What `implementation="pallas"` runs, as it is handed to XLA."""
    problem = dispatch.Problem("gemm_k", 4096, 4096, 14336, 128, "bfloat16")
    config = for_pallas(KTileConfig(256, 64, 8, 3), problem)

    def run(h, w, mask):
        layout = mask_layout(mask, k_axis=True, implementation="xla")
        return gemm_k(h, w, layout.k_order, None, None, 128, config)

    bf16 = jnp.bfloat16
    shapes = (((4096, 14336), bf16), ((4096, 14336), bf16), ((4096, 112), jnp.bool_))
    ((text, warps, stages),) = pallas_kernels_of(run, *shapes)
    found = compile_ttir_usage(text, device.capability, warps, stages)
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block


def ptx_of(build, capability: int, warps: int, stages: int) -> str:
    kernel, signature, constants = build
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    arrays = [i for i, kind in enumerate(types.values()) if kind.startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in arrays}
    source = ASTSource(kernel, types, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]


@pytest.mark.parametrize("one_pass", [True, False], ids=["o", "down"])
def test_loads_run_ahead_of_the_products(one_pass):
    """In the loop, the wait for a step's operands leaves the copies of the next steps under way."""
    config = KTileConfig(256, 64, 8, 3, 2, 8)
    build = tile_build(config, "bfloat16", one_pass=one_pass)
    ptx = ptx_of(build, 90, config.num_warps, config.num_stages)
    loop = ptx[: ptx.index("wgmma.mma_async")]
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+);", loop)
    assert waits == ["2"]  # two copies, inputs and weights, of one step ahead


@triton.jit
def add_rows_kernel(partial, rows, out):
    """A tile of 128 x 128 partial sums added to gathered rows, as schemes with atomics do."""
    token = tl.load(rows + tl.arange(0, 128))[:, None]
    column = tl.arange(0, 128)[None, :]
    value = tl.load(partial + tl.arange(0, 128)[:, None] * 128 + column)
    tl.atomic_add(out + token * 4096 + column, value.to(out.dtype.element_ty), sem="relaxed")


def test_what_a_tile_costs_where_bf16_atomics_are_loops():
    """On sm80: eight wide stores a thread, where adding in bf16 is a loop for every value."""
    config = KTileConfig(128, 32, 8, 4, 2, 8)
    ours = ptx_of(tile_build(config, "bfloat16", one_pass=False), 80, 8, 4)
    wide = 128 * 128 * 2 // (8 * 32) // 16  # bytes of a tile in fp16, by thread, by 16
    assert len(re.findall(r"\bst\.global\.v4\.b32", ours)) == wide == 8
    assert len(re.findall(r"\bst\.global\.", ours)) == wide + 1  # and the rows' power of two
    signature = dict(partial="*fp32", rows="*i32", out="*bf16")
    theirs = ptx_of((add_rows_kernel, signature, {}), 80, 4, 1)
    assert len(re.findall(r"\batom\.\S*\.cas\.", theirs)) == 128 * 128 // (4 * 32)
    newer = ptx_of((add_rows_kernel, signature, {}), 90, 4, 1)
    assert not re.findall(r"\.cas\.", newer)
