"""Every shipped config compiles to machine code for the cards we cannot touch, without spills."""

import dataclasses
import functools

import pytest
import triton

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels._common import tuned
from pallas_kernels._common.config import Config, SmallConfig, TileConfig
from pallas_kernels._common.cubin import (
    Usage,
    compile_usage,
    small_signature,
    tile_signature,
)
from pallas_kernels._common.device import A100, H200, KNOWN_DEVICES, RTX_5090, Device
from pallas_kernels._common.small_kernel import small_kernel
from pallas_kernels._common.tile_kernel import tile_kernel
from pallas_kernels._common.zero_kernel import zero_kernel
from pallas_kernels.layout.triton import BLOCK_G, BLOCK_M, count_kernel, place_kernel


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
            if e.config is not None:
                tokens = e.m if isinstance(e.config, SmallConfig) else 4096
                one = Shipped(device, e.op, e.dtype, tokens, e.config)
                found[dataclasses.replace(one, config=_without_band(e.config))] = one
    return sorted(found.values(), key=str)


def _without_band(config: Config) -> Config:
    """The band is a number in the code, not a shape: one of a kind is enough."""
    return dataclasses.replace(config, band=1) if isinstance(config, TileConfig) else config


@functools.cache
def usage(shipped: Shipped) -> Usage:
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
        PRECISION="tf32",
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
    )
    if isinstance(config, TileConfig):
        constants |= dict(
            BLOCK_M=config.block_m,
            BAND=config.band,
            WIDE=False,
            ZERO_ROWS_PER_STEP=triton.next_power_of_2(config.block_m * config.block_k // k),
            PERSISTENT=config.persistent,
            COUNTS=triton.next_power_of_2(n // group),
        )
        kernel, signature = tile_kernel, tile_signature(shipped.dtype)
    else:
        tokens = shipped.tokens
        constants |= dict(TOKENS=1 if tokens == 1 else max(16, triton.next_power_of_2(tokens)))
        kernel, signature = small_kernel, small_signature(shipped.dtype)
    return compile_usage(
        kernel,
        signature,
        constants,
        shipped.device.capability,
        config.num_warps,
        config.num_stages,
    )


@pytest.mark.parametrize("shipped", shipped(), ids=str)
def test_shipped_config_compiles_without_spills_and_fits(shipped):
    found = usage(shipped)
    assert found.spills == 0
    assert found.shared_memory <= shipped.device.shared_memory_per_block
    modelled = shipped.config.shared_memory_bytes(
        2, 1 + (shipped.op == "swiglu_up"), shipped.device.capability, shipped.tokens
    )
    assert found.shared_memory <= modelled + 4096  # the model that filters configs before launch
    tensor_core = {"8.0": "mma.sync", "9.0": "wgmma.mma_async", "12.0": "mma.sync"}
    if isinstance(shipped.config, TileConfig):
        assert tensor_core[shipped.device.capability] in found.instructions
        assert "cp.async.cg" in found.instructions
    assert not found.instructions & {"red.", "atom."}  # deterministic: no atomics anywhere


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
        LAYOUT | {"BLOCKS": 64},
    ),
    "zero": (
        zero_kernel,
        {"y": "*bf16", "mask": "*i1", "M": "i32"},
        {"N": 4096, "G": 512, "GROUPS": 8, "BLOCK_M": 64, "BLOCK_N": 256},
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
                matrices = 1 + (op == "swiglu_up")
                needed = config.shared_memory_bytes(2, matrices, device.capability, m)
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
