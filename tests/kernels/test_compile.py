"""Every shipped config compiles to machine code for the cards we cannot touch, without spills."""

import dataclasses
import functools
import importlib
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import triton
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_kernels
from eval.kernel_cases import FAMILIES
from pallas_kernels import dispatch
from pallas_kernels._common import triton_support, tuned
from pallas_kernels._common.config import (
    Config,
    KTileConfig,
    PersistentConfig,
    SmallConfig,
    TileConfig,
)
from pallas_kernels._common.cubin import (
    Usage,
    compile_ttir_usage,
    compile_usage,
    persistent_signature,
    small_signature,
    split_signature,
    tile_signature,
)
from pallas_kernels._common.device import A100, H200, KNOWN_DEVICES, RTX_5090, Device
from pallas_kernels._common.output_pruned import pallas_config
from pallas_kernels._common.pallas_tile import tile_gemm
from pallas_kernels._common.persistent_kernel import persistent_kernel
from pallas_kernels._common.small_kernel import small_kernel
from pallas_kernels._common.split_kernel import split_k_kernel, sum_kernel
from pallas_kernels._common.tile_kernel import tile_kernel
from pallas_kernels._common.triton_gemm import zero_constants, zero_rows
from pallas_kernels._common.zero_kernel import zero_kernel
from pallas_kernels.layout.triton import BLOCK_G, BLOCK_M, count_kernel, place_kernel
from tests.kernels import input_pruned

run_module = importlib.import_module("pallas_kernels._common.run")
layout_pallas = importlib.import_module("pallas_kernels.layout.pallas")


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A config of a table, on the shape it is for; token counts only matter to the small form."""

    device: Device
    op: str
    dtype: str
    tokens: int
    config: Config

    def __str__(self) -> str:
        fields = "x".join(str(value) for value in dataclasses.astuple(self.config))
        return f"{self.device.capability}-{self.op}-{self.tokens}-{fields}"


def shipped() -> list[Shipped]:
    found = {}
    for device in KNOWN_DEVICES:
        table = tuned.load(device.kind)
        assert table is not None
        for e in table.entries:
            if isinstance(e.problem, dispatch.Problem) and e.config is not None:
                tokens = e.problem.m if isinstance(e.config, SmallConfig) else 4096
                one = Shipped(device, e.op, e.problem.dtype, tokens, e.config)
                found[dataclasses.replace(one, config=_without_band(e.config))] = one
    # What the tuner tries on the card that most of this was measured on, whether or not it won.
    for op, m in itertools.product(("gemm_mn", "swiglu_up"), (64, 4096)):
        for config in FAMILIES[op].make(m, 128, "llama-3.1-8b").candidates(H200):
            one = Shipped(H200, op, "bfloat16", m, config)
            found.setdefault(dataclasses.replace(one, config=_without_band(config)), one)
    return sorted(found.values(), key=str)


def _without_band(config: Config) -> Config:
    """The band is a number in the code, not a shape: one of a kind is enough."""
    tiled = isinstance(config, TileConfig | PersistentConfig | KTileConfig)
    return dataclasses.replace(config, band=1) if tiled else config


@dataclasses.dataclass(frozen=True)
class Build:
    """A Triton kernel as `compile_usage` takes it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]


def output_pruned_build(shipped: Shipped) -> Build:
    config, glu = shipped.config, shipped.op == "swiglu_up"
    n, k = (14336, 4096) if glu else (4096, 4096)
    group = max(128, config.block_n)
    constants = dict(
        N=n,
        K=k,
        G=group,
        GROUPS=n // group,
        GLU=glu,
        HAS_BIAS=False,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
    )
    if isinstance(config, TileConfig):
        constants |= dict(
            BLOCK_M=config.block_m,
            BAND=config.band,
            WIDE=False,
            SHARE_ZEROS=config.share_zeros,
            HALVES=config.halves,
            ZERO_ROWS=zero_rows(config, k),
        )
        constants["PRECISION"] = "tf32"
        return Build(tile_kernel, tile_signature(shipped.dtype), constants)
    if isinstance(config, PersistentConfig):
        constants |= dict(
            GROUPS_POWER=triton.next_power_of_2(n // group),
            COMPACT=config.compact,
            BLOCK_M=config.block_m,
            BAND=config.band,
            STAGES=config.num_stages,
            PROGRAMS=config.programs,
            ZERO_ROWS=zero_rows(config, k),
        )
        return Build(persistent_kernel, persistent_signature(shipped.dtype), constants)
    constants["PRECISION"] = "tf32"
    tokens = shipped.tokens
    if config.splits > 1:
        constants |= dict(SPLITS=config.splits, TOKENS=max(16, triton.next_power_of_2(tokens)))
        del constants["HAS_BIAS"]
        return Build(split_k_kernel, split_signature(shipped.dtype), constants)
    constants |= dict(TOKENS=1 if tokens == 1 else max(16, triton.next_power_of_2(tokens)))
    return Build(small_kernel, small_signature(shipped.dtype), constants)


def input_pruned_build(shipped: Shipped) -> Build:
    config = shipped.config
    if isinstance(config, KTileConfig):
        return Build(*input_pruned.tile_build(config, shipped.dtype, one_pass=False))
    return Build(*input_pruned.small_build(config, shipped.dtype, shipped.tokens))


# Op -> the kernel that a shipped config of it runs, on a shape large enough to matter.
BUILDS: dict[str, Callable[[Shipped], Build]] = {
    "gemm_mn": output_pruned_build,
    "swiglu_up": output_pruned_build,
    "gemm_k": input_pruned_build,
}


@functools.cache
def usage(shipped: Shipped) -> Usage:
    build, config = BUILDS[shipped.op](shipped), shipped.config
    return compile_usage(
        build.kernel,
        build.signature,
        build.constants,
        shipped.device.capability,
        config.num_warps,
        config.num_stages,
    )


@pytest.mark.parametrize("shipped", shipped(), ids=str)
def test_shipped_config_compiles_without_spills_and_fits(shipped):
    found = usage(shipped)
    assert found.spills == 0
    assert found.shared_memory <= shipped.device.shared_memory_per_block
    problem = dispatch.Problem(shipped.op, shipped.tokens, 4096, 4096, 128, shipped.dtype)
    modelled = dispatch.facts(shipped.op).shared_memory_bytes(
        shipped.config, problem, shipped.device.capability
    )
    # The model that filters configs before launch. gemm_k stages a part of its result beside it.
    staged = 128 * 64 * 2 if isinstance(shipped.config, KTileConfig) else 0
    assert found.shared_memory <= modelled + staged + 4096
    tensor_core = {"8.0": "mma.sync", "9.0": "wgmma.mma_async", "12.0": "mma.sync"}
    if isinstance(shipped.config, TileConfig | PersistentConfig | KTileConfig):
        assert tensor_core[shipped.device.capability] in found.instructions
        assert "cp.async.cg" in found.instructions
    assert not found.instructions & {"red.", "atom."}  # deterministic: no atomics anywhere


def test_a_gluon_kernel_is_called_with_its_own_waits(monkeypatch):
    """What jaxlib is given: not what Triton's optimiser makes of it (it would wait for all)."""
    from jaxlib import gpu_triton

    from pallas_kernels._common import gluon_support

    seen = []

    def kernel(name, num_warps, num_ctas, shared, ptx, text, arch):
        seen.append((num_warps, shared, ptx, arch))
        return original(name, num_warps, num_ctas, shared, ptx, text, arch)

    original = gpu_triton.TritonKernel
    monkeypatch.setattr(gpu_triton, "TritonKernel", kernel)
    monkeypatch.setattr(triton_support, "current_device", lambda: H200)
    monkeypatch.setattr(run_module, "current_device", lambda: H200)
    config = PersistentConfig(128, 256, 64, 8, 3, 8, 132, compact=True)

    def call(x, w, mask):
        layout = pallas_kernels.mask_layout(mask, implementation="xla")
        return pallas_kernels.gemm_mn(x, w, layout, implementation="triton", config=config)

    bf16 = jnp.bfloat16
    shapes = (((4096, 4096), bf16), ((4096, 4096), bf16), ((4096, 8), jnp.bool_))
    traced = jax.jit(call).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"@{gluon_support.CALL_TARGET}" in text
    ((warps, shared, ptx, arch),) = seen
    assert (warps, arch) == (8, 90)
    assert 147_456 < shared <= H200.shared_memory_per_block
    # Two steps' copies stay under way; only the end of a tile waits for the last product.
    assert len(re.findall(r"cp\.async\.wait_group\s+1;", ptx)) == 3
    assert len(re.findall(r"wgmma\.wait_group\S*\s+0;", ptx)) == 1


def pallas_kernels_of(function, *shapes) -> list[tuple[str, int, int]]:
    """Triton IR, warps and stages of every Pallas kernel that `function` lowers to for a GPU."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    device = AbstractDevice(device_kind="NVIDIA A100", num_cores=108, platform="gpu")
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with (
        use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)),
        warnings.catch_warnings(),
    ):
        # Lowering is what is tested here; docs/kernels.md says what hangs on the deprecated path.
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    found = []

    def visit(operation):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    if inner.operation.name == "stablehlo.custom_call":
                        call = inner.operation.attributes
                        if "triton" in str(call["call_target_name"]):
                            found.append(call["mhlo.backend_config"])
                    visit(inner.operation)

    visit(lowered.compiler_ir("stablehlo").operation)
    kernels = []
    for config in found:
        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            dialect.register_dialect(context)
            text = ir.Module.parse(config["ir"].value_bytes).operation.get_asm()
        kernels.append((text, config["num_warps"].value, config["num_stages"].value))
    return kernels


@functools.cache
def pallas_usage(text: str, capability: str, warps: int, stages: int) -> Usage:
    return compile_ttir_usage(text, capability, warps, stages)


@functools.cache
def pallas_op(op: str, config: TileConfig) -> list[tuple[str, int, int]]:
    n = 4096
    group = max(128, config.block_n)

    def run(x, w, w_up, mask):
        layout = pallas_kernels.mask_layout(mask, implementation="xla")
        weights = (w, w_up) if op == "swiglu_up" else (w,)
        return tile_gemm(x, weights, None, layout, group, config)

    bf16 = jnp.bfloat16
    shapes = (((4096, 4096), bf16), ((n, 4096), bf16), ((n, 4096), bf16))
    return pallas_kernels_of(run, *shapes, ((4096, n // group), jnp.bool_))


PALLAS_TILES = ("gemm_mn", "swiglu_up")


# What every config of a table becomes when Pallas is asked for by name.
@pytest.mark.parametrize("shipped", [s for s in shipped() if s.op in PALLAS_TILES], ids=str)
def test_shipped_config_compiles_in_pallas(shipped):
    config = pallas_config(shipped.config, 1 + (shipped.op == "swiglu_up"))
    ((text, warps, stages),) = pallas_op(shipped.op, config)
    found = pallas_usage(text, shipped.device.capability, warps, stages)
    assert found.spills == 0
    assert found.shared_memory <= shipped.device.shared_memory_per_block


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
def test_pallas_layout_compiles(device, monkeypatch):
    monkeypatch.setattr(layout_pallas, "current_device", lambda: device)
    kernels = pallas_kernels_of(layout_pallas.order_tokens, ((4096, 112), jnp.bool_))
    ((text, warps, stages),) = kernels
    found = compile_ttir_usage(text, device.capability, warps, stages)
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block


LAYOUT = {"GROUPS": 112, "BLOCK_M": BLOCK_M, "BLOCK_G": BLOCK_G}
OTHERS = {
    "count": (count_kernel, {"mask": "*i1", "M": "i32", "partial": "*i32"}, LAYOUT),
    "place": (
        place_kernel,
        {
            "mask": "*i1",
            "partial": "*i32",
            "M": "i32",
            "blocks": "i32",
            "order": "*i32",
            "count": "*i32",
        },
        LAYOUT | {"BLOCKS": 512},
    ),
    "sum": (
        sum_kernel,
        {"sums": "*fp32", "bias": "*bf16", "mask": "*i1", "M": "i32", "out": "*bf16"},
        {
            "N": 4096,
            "G": 512,
            "GROUPS": 8,
            "GLU": True,
            "HAS_BIAS": False,
            "SPLITS": 8,
            "BLOCK": 512,
        },
    ),
    "zero": (
        zero_kernel,
        {"y": "*bf16", "mask": "*i1", "M": "i32"},
        zero_constants(4096, 4096, 512, 8),
    ),
    "zero, small groups": (
        zero_kernel,
        {"y": "*bf16", "mask": "*i1", "M": "i32"},
        zero_constants(4096, 4096, 32, 128),
    ),
}


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_compile_without_spills(name, device):
    kernel, signature, constants = OTHERS[name]
    found = compile_usage(kernel, signature, constants, device.capability, 4, 1)
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_configs_from_shapes_alone_compile(device, dtype, tokens):
    """What a dtype without a table runs with."""
    problem = dispatch.Problem("swiglu_up", tokens, 14336, 4096, 128, dtype)
    config = dispatch.default_config(problem, device.shared_memory_per_block, device.capability)
    found = usage(Shipped(device, "swiglu_up", dtype, tokens, config))
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block


@pytest.mark.parametrize("group", [64, 80, 96, 128, 256])
def test_case_E7_configs_for_consumer_cards_fit(group):
    """No tile tuned for a data-centre card reaches a card with less shared memory."""
    for op in ("gemm_mn", "swiglu_up"):
        for m in (1, 8, 64, 128, 16384):
            for kind in ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4090", "unheard of"):
                device = Device(kind, "8.9" if "4090" in kind else "12.0")
                choice = pallas_kernels.explain(
                    op, m=m, n=80 * group, k=4096, group=group, device=device
                )
                config = choice.config or dispatch.config_for(
                    dispatch.Problem(op, m, 80 * group, 4096, group, "bfloat16"), device
                )
                problem = dispatch.Problem(op, m, 80 * group, 4096, group, "bfloat16")
                needed = dispatch.facts(op).shared_memory_bytes(config, problem, device.capability)
                assert needed <= 101_376


def test_case_E7_limits():
    limits = {"8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": 232_448, "12.0": 101_376}
    for capability, limit in limits.items():
        assert Device("any", capability).shared_memory_per_block == limit
    assert Device("of next year", "13.0").shared_memory_per_block == 101_376
    assert [d.shared_memory_per_block for d in (A100, H200, RTX_5090)] == [
        166_912,
        232_448,
        101_376,
    ]
