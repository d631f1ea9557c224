"""What attention runs when nothing is named, its tables, benchmark and tuner, and machine code."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import eval.bench_kernels
import eval.kernel_cases.attention
import eval.kernels_beside
import eval.tune_kernels
from eval.bench_kernels import BenchConfig
from eval.kernel_cases import families
from eval.kernel_cases.attention import AttentionBench, AttentionCase, AttentionTune
from eval.kernel_timing import Timing
from eval.tune_kernels import TuneConfig
from pallas_kernels import dispatch, explain
from pallas_kernels._attention.config import DecodeConfig, FlashConfig, MosaicConfig, head_block
from pallas_kernels._attention.problem import AttentionProblem
from pallas_kernels._common import tuned
from pallas_kernels._common.config import SmallConfig
from pallas_kernels._common.cubin import TYPE_NAMES, Usage, compile_usage
from pallas_kernels._common.device import A100, CPU, H200, KNOWN_DEVICES, RTX_5090, Device
from pallas_kernels._common.shapes import MODELS, ModelShape
from pallas_kernels._common.testing import interpreted
from pallas_kernels.attention_decode.split_kernel import merge_kernel, split_kernel
from pallas_kernels.attention_decode.triton import NewTokens, split_constants
from pallas_kernels.attention_prefill.compact_kernel import gather_kernel, scatter_kernel
from pallas_kernels.attention_prefill.flash_kernel import flash_kernel
from pallas_kernels.attention_prefill.mosaic import gather_warps
from pallas_kernels.dispatch import choose, config_for, default_config, facts

LLAMA = dict(hq=32, hk=8, d=128, group=4)
PREFILL = dict(b=1, t=16384, s=16384, **LLAMA)
DECODE = dict(b=16, t=1, s=16384, **LLAMA)


def problem(op="attention_prefill", **changes) -> AttentionProblem:
    shape = PREFILL if op == "attention_prefill" else DECODE
    return AttentionProblem(op, **{**shape, "dtype": "bfloat16", **changes})


def test_a_cpu_runs_the_reference():
    for op, shape in (("attention_prefill", PREFILL), ("attention_decode", DECODE)):
        choice = explain(op, **shape, device=CPU)
        assert choice.implementation == "reference"
        assert "not a CUDA device" in choice.reason


def test_hopper_runs_mosaic_and_others_triton():
    half = explain("attention_prefill", **PREFILL, expected_sparsity=0.5, device=H200)
    assert half.implementation == "mosaic"
    assert half.measured
    assert "took" in half.reason
    assert half == explain("attention_prefill", **PREFILL, device=H200)
    for device in (A100, RTX_5090, Device("NVIDIA L4", "8.9")):
        other = explain("attention_prefill", **PREFILL, device=device)
        assert other.implementation == "triton"
        assert not other.measured
    # What Mosaic has not run on a card, or cannot: chunks, windows and such, other heads, float32.
    unproven = (dict(plain=False), dict(from_start=False), dict(d=64), dict(d=256))
    for changes in (*unproven, dict(d=96), dict(d=80), dict(dtype="float32")):
        assert choose(problem(**changes), H200).implementation == "triton"
    h100 = explain("attention_prefill", **PREFILL, device=Device("NVIDIA H100 80GB HBM3", "9.0"))
    assert h100.implementation == "mosaic"
    assert not h100.measured


def test_decode_on_an_h200_was_measured():
    choice = explain("attention_decode", **DECODE, expected_sparsity=0.5, device=H200)
    assert choice.implementation == "triton"
    assert isinstance(choice.config, DecodeConfig)
    assert choice.measured


def test_dense_only_where_cudnn_can():
    """A table that says dense sends what cuDNN cannot run to the fastest kernel."""
    entry = tuned.Entry(problem(expected_sparsity=0.5), "dense", MosaicConfig(128, 2))
    table = tuned.Table("NVIDIA H200", "9.0", True, (entry,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "load", lambda kind: table)
        assert choose(problem(), H200).implementation == "dense"
        chunk = choose(problem(plain=False), H200)
        assert chunk.implementation == "triton"  # the entry's kernel does not run a chunk
        assert "derived" in chunk.reason
        flash = dataclasses.replace(entry, config=FlashConfig(64, 64, 4, 3))
        patch.setattr(tuned, "load", lambda kind: dataclasses.replace(table, entries=(flash,)))
        chunk = choose(problem(plain=False), H200)
        assert chunk.config == flash.config
        assert "cannot run this" in chunk.reason
        assert choose(problem(dtype="float32"), H200).implementation == "triton"


def test_without_triton_cudnn_runs_with_a_notice(monkeypatch, caplog):
    monkeypatch.setattr("pallas_kernels._common.triton_support.available", lambda: False)
    assert choose(problem(), H200).implementation == "dense"
    assert choose(problem(plain=False), H200).implementation == "reference"
    assert "not installed" in caplog.text
    old = choose(problem(), Device("Tesla V100", "7.0"))
    assert old.implementation == "reference"


@pytest.mark.parametrize(
    "config", [FlashConfig(64, 32, 4, 2), MosaicConfig(192, 2), DecodeConfig(512, 64, 4, 3)]
)
def test_configs_and_tables_round_trip(config, tmp_path):
    op = "attention_decode" if isinstance(config, DecodeConfig) else "attention_prefill"
    entry = tuned.Entry(problem(op, expected_sparsity=0.5), "dense", config, 1.0, 2.0)
    product = dispatch.Problem("gemm_k", 8, 64, 32, 16, "float16", 0.25)
    entries = (entry, tuned.Entry(product, "triton", SmallConfig(16, 16, 4, 2)))
    table = tuned.Table("NVIDIA H200", "9.0", False, entries, "a model", {"jax": "1"})
    tuned.write(table, tmp_path / "table.json")
    assert tuned.read((tmp_path / "table.json").read_text()) == table


def test_bad_configs_are_refused():
    with pytest.raises(ValueError, match="block_m=48 must be a power of two"):
        FlashConfig(48, 32, 4, 2)
    with pytest.raises(ValueError, match="block_n=96 must be a multiple of 64"):
        MosaicConfig(96, 2)
    with pytest.raises(ValueError, match="stages=1 must be at least 2"):
        MosaicConfig(64, 1)
    with pytest.raises(ValueError, match="unknown config form"):
        facts("attention_prefill").config_from_json({"form": "tile"})
    with pytest.raises(ValueError, match="does not fit FlashConfig"):
        facts("attention_prefill").config_from_json({"form": "flash", "blocks": 3})


def test_families_are_named_or_all():
    assert {"gemm_mn", "attention_prefill", "attention_decode"} <= set(families(()))
    assert list(families(("attention_decode",))) == ["attention_decode"]
    with pytest.raises(ValueError, match="unknown ops"):
        families(("attention_prefil",))


TINY_PREFILL = AttentionCase("attention_prefill", 1, 40, 40, 4, 2, 64, 2)
TINY_DECODE = AttentionCase("attention_decode", 3, 1, 64, 4, 2, 64, 2)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Kernels in their interpreters on an A100 by name; XLA on the CPU stands in for cuDNN."""

    def clock(contenders, rounds=30):
        return {name: Timing((1.0 + i,) * rounds) for i, name in enumerate(contenders)}

    original = AttentionCase.pruned

    def pruned(self, implementation, config=None):
        return original(self, "reference" if implementation == "dense" else implementation, config)

    for module in (eval.bench_kernels, eval.tune_kernels):
        monkeypatch.setattr(module, "current_device", lambda: A100)
    for module in (eval.bench_kernels, eval.kernels_beside, eval.tune_kernels):
        monkeypatch.setattr(module, "time_interleaved", clock)
    monkeypatch.setattr("pallas_kernels.dispatch.current_device", lambda: A100)
    monkeypatch.setattr(AttentionCase, "pruned", pruned)
    monkeypatch.setattr(
        AttentionCase, "dense", lambda self: {"cudnn, unmasked": pruned(self, "dense")}
    )
    monkeypatch.setattr(eval.kernel_cases.attention, "FLASH_MMA", ((32, 32, 4, 2),))
    monkeypatch.setattr(eval.kernel_cases.attention, "DECODE_SPLITS", ((64, 32, 4, 2),))
    monkeypatch.setattr(eval.kernel_cases.attention, "COLD_BYTES", 1000)
    monkeypatch.setitem(MODELS, "tiny", ModelShape(32, 64, 4, 2, 64))
    with interpreted():
        yield


OPS = ("attention_prefill", "attention_decode")
SIZES = dict(prefill_tokens=(40,), decode=((3, 64),), decode_groups=(2,))


def test_the_benchmark_writes_complete_records(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(eval.kernels_beside, "copy_record", _no_copy)
    monkeypatch.setattr(eval.kernels_beside, "COPIES", (1,))
    config = BenchConfig(
        json=tmp_path / "kernels.jsonl",
        plots=tmp_path / "plots",
        model="tiny",
        ops=OPS,
        sparsities=(0.0, 0.5),
        masks=("random",),
        rounds=2,
        attention=AttentionBench(**SIZES, groups=(2,)),
    )
    rows = eval.bench_kernels.main(config)
    assert len((tmp_path / "kernels.jsonl").read_text().splitlines()) == len(rows)
    assert {row["op"] for row in rows} == {"copy", "rope_cache", *OPS}
    assert eval.bench_kernels.table(rows).row_count == 8  # what dispatch runs, and the copy
    rotations = [row for row in rows if row["op"] == "rope_cache"]
    assert [(row["shape"]["t"], row["implementation"]) for row in rotations] == [
        *((tokens, name) for tokens in (1, 40) for name in ("reference", "triton")),
        *((40, name) for name in ("queries before attention", "queries in attention")),
    ]
    assert [row["sparsity"] for row in rotations[:4]] == [0.0] * 4
    assert all(0.3 < row["sparsity"] < 0.7 for row in rotations[4:])
    assert not config.plots.exists()  # they are of products
    for op, form in zip(OPS, ("flash", "decode"), strict=True):
        of_op = [row for row in rows if row["op"] == op]
        for sparsity in (0.0, 0.5):
            cell = [row for row in of_op if row["expected_sparsity"] == sparsity]
            assert sum(row["dispatched"] for row in cell) == 1
            [row] = [row for row in cell if row["implementation"] == "triton"]
            assert row["rel_error"] < 1e-2
            assert row["speedup"] == row["dense_ms"] / row["ms"]
            assert row["shape"]["tk"] == (64 if op == "attention_decode" else 40)
            assert row["config"]["form"] == form
            full = [r for r in cell if r["implementation"] == eval.bench_kernels.FULL]
            assert len(full) == (op == "attention_decode")
        full, half = (next(r for r in of_op if r["expected_sparsity"] == s) for s in (0.0, 0.5))
        assert half["flops"] < full["flops"]
        assert half["bytes"] < full["bytes"]


def _no_copy(nbytes, rounds):
    what = {
        "op": "copy",
        "case": "copy",
        "shape": {"bytes": nbytes},
        "dtype": "float32",
        "bytes": 2,
    }
    return what | {"sparsity": 0.0, "mask": "none", "implementation": "xla", "ms": 1.0}


def tune_config(folder, sparsities, **changes) -> TuneConfig:
    attention = AttentionTune(**SIZES, prefill_groups=(2,), sparsities=sparsities)
    return TuneConfig(folder, model="tiny", ops=OPS, rounds=2, attention=attention, **changes)


def test_the_tuner_writes_every_problem_and_resumes(fake_gpu, tmp_path):
    table = eval.tune_kernels.main(tune_config(tmp_path, (0.0,)))
    path = tmp_path / "nvidia_a100.json"
    assert set(tuned.read(path.read_text()).entries) == set(table.entries)
    assert [entry.op for entry in table.entries] == list(OPS)
    assert {entry.implementation for entry in table.entries} == {"dense"}  # by the fake clock
    more = eval.tune_kernels.main(tune_config(tmp_path, (0.0, 0.5)))
    assert len(more.entries) == 4
    assert set(table.entries) < set(more.entries)
    # Measuring some of it again keeps the rest, whatever the op.
    product = dispatch.Problem("gemm_k", 8, 64, 32, 16, "float16", 0.25)
    other = tuned.Entry(product, "dense", None, 1.0, 1.0)
    tuned.write(dataclasses.replace(more, entries=(*more.entries, other)), path)
    again = eval.tune_kernels.main(tune_config(tmp_path, (0.0,), again=True))
    assert set(again.entries) == {*more.entries, other}


def test_the_tuner_stops_at_a_wrong_kernel(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(eval.tune_kernels, "relative_error", lambda a, b: float("nan"))
    with pytest.raises(RuntimeError, match="differs from dense by nan"):
        eval.tune_kernels.main(tune_config(tmp_path, (0.0,)))


def test_active_work_is_counted_by_hand():
    case = AttentionCase("attention_decode", 2, 1, 10, 4, 2, 8, 2)
    mask = jnp.array([[True, False], [False, False]])
    cache, query, out = 2 * 10 * 8, 2 * 8, 2 * 4 * 8
    assert case.active(mask) == {"flops": 4 * 2 * 10 * 8, "bytes": 2 * (cache + query + out)}
    case = AttentionCase("attention_prefill", 1, 3, 3, 2, 1, 8, 1)
    mask = jnp.array([[True, False], [True, True], [False, False]])
    assert case.active(mask)["flops"] == 4 * 8 * (1 + 2 + 2)


# ---- machine code ----


def flash_usage(device: Device, config: FlashConfig, d: int, dtype: str) -> Usage:
    kind = TYPE_NAMES[dtype]
    signature = dict.fromkeys(("q", "k", "v", "out"), kind)
    signature |= dict.fromkeys(("order", "before", "count", "low", "high"), "*i32")
    signature |= dict.fromkeys(("T", "S", "rows"), "i32")
    constants = dict(HQ=32, HK=8, D=d, GROUPS=8, SCALE=0.1, PRECISION="ieee")
    if dtype != "float32":
        constants["PRECISION"] = "tf32"
    blocks = dict(BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=head_block(d))
    return compile_usage(
        flash_kernel,
        signature,
        constants | blocks,
        device.capability,
        config.num_warps,
        config.num_stages,
    )


def split_usage(
    device: Device, config: DecodeConfig, d: int, dtype: str, new: NewTokens | None = None
) -> Usage:
    """With `new` the kernel of a step; what it reads of one is the query again without."""
    step = ("new_k", "new_v", "cos", "sin", "q_norm", "k_norm")
    signature = dict.fromkeys(("q", "k", "v", *step), TYPE_NAMES[dtype])
    signature |= {"mask": "*i1", "low": "*i32", "high": "*i32"}
    signature |= dict.fromkeys(("S", "rows", "splits"), "i32")
    signature |= dict.fromkeys(("peaks", "totals", "sums"), "*fp32")
    if new is not None:
        signature |= {"cos": "*fp32", "sin": "*fp32"}
    q, k = (jnp.zeros(shape, dtype) for shape in ((1, 32, d), (1, 100, 8, d)))
    return compile_usage(
        split_kernel,
        signature,
        split_constants(q, k, 8, 0.1, config, new),
        device.capability,
        config.num_warps,
        config.num_stages,
    )


def assert_fits(
    found: Usage, device: Device, config: FlashConfig | DecodeConfig, d: int, dtype: str
) -> None:
    """No spills, shared memory as the model that filters configs has it, no atomics."""
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block
    itemsize = 4 if dtype == "float32" else 2
    modelled = config.shared_memory_bytes(d, itemsize, device.capability)
    assert found.shared_memory <= modelled + 4096
    assert not found.instructions & {"red.", "atom."}  # reruns are bit-identical


def shipped() -> list[tuple[Device, FlashConfig | DecodeConfig, int, str]]:
    """Every Triton config of a table, and what shapes alone lead to for other heads and dtypes."""
    found = {}
    for device in KNOWN_DEVICES:
        for entry in tuned.load(device.kind).entries:
            if isinstance(entry.problem, AttentionProblem):
                found[device, entry.config, entry.problem.d, entry.problem.dtype] = None
        for d in (64, 80, 96, 128, 256):
            for dtype in ("bfloat16", "float32"):
                for op in ("attention_prefill", "attention_decode"):
                    config = default_config(
                        problem(op, d=d, dtype=dtype),
                        device.shared_memory_per_block,
                        device.capability,
                    )
                    found[device, config, d, dtype] = None
    return [key for key in found if not isinstance(key[1], MosaicConfig)]


@pytest.mark.parametrize(
    ("device", "config", "d", "dtype"),
    shipped(),
    ids=lambda value: getattr(value, "capability", None) or str(value),
)
def test_shipped_configs_compile_without_spills_and_fit(device, config, d, dtype):
    if isinstance(config, FlashConfig):
        found = flash_usage(device, config, d, dtype)
        if dtype == "bfloat16":
            wgmma = "wgmma.mma_async" if device is H200 else "mma.sync"
            assert {wgmma, "cp.async.cg"} <= found.instructions
    else:
        found = split_usage(device, config, d, dtype)
    assert_fits(found, device, config, d, dtype)


INTS = dict.fromkeys(("order", "before", "count", "low", "high", "total"), "*i32")
INTS |= dict.fromkeys(("low_out", "high_out", "bounds"), "*i32")
INTS |= dict.fromkeys(("T", "rows", "padded", "splits"), "i32")
SHAPE = dict(HQ=32, D=128, GROUPS=8)
PLAIN = dict(ROTATED=False, HAS_NORM=False, EPS=0.0)
OTHERS = {
    "gather": (
        gather_kernel,
        dict.fromkeys(("q", "cos", "sin", "norm", "out"), "*bf16"),
        dict(SHAPE, BLOCK=64, BLOCK_D=128, KEYS=192, **PLAIN),
    ),
    "scatter": (
        scatter_kernel,
        {"compact": "*bf16", "out": "*bf16"},
        dict(SHAPE, BLOCK=64, BLOCK_D=128),
    ),
    "merge": (
        merge_kernel,
        {"peaks": "*fp32", "totals": "*fp32", "sums": "*fp32", "mask": "*i1", "out": "*bf16"},
        dict(SHAPE, SPLIT=256, BLOCK_S=128, BLOCK_C=32),
    ),
}


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_compile_without_spills(name, device):
    kernel, signature, constants = OTHERS[name]
    signature = {**{n: t for n, t in INTS.items() if n in kernel.arg_names}, **signature}
    found = compile_usage(kernel, signature, constants, device.capability, 4, 1)
    assert found.spills == 0
    assert found.shared_memory <= device.shared_memory_per_block


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda d: d.capability)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_gather_that_rotates_compiles_without_spills(d, normed, device):
    signature = {n: t for n, t in INTS.items() if n in gather_kernel.arg_names}
    signature |= dict.fromkeys(("q", "norm", "out"), "*bf16") | dict.fromkeys(
        ("cos", "sin"), "*fp32"
    )
    turning = dict(ROTATED=True, HAS_NORM=normed, EPS=1e-6)
    constants = dict(HQ=32, D=d, GROUPS=8, BLOCK=64, BLOCK_D=d, KEYS=192, **turning)
    found = compile_usage(
        gather_kernel, signature, constants, device.capability, gather_warps(d, rotated=True), 1
    )
    assert found.spills == 0
    assert not found.instructions & {"red.", "atom."}


def mosaic_lowered(d: int, config: MosaicConfig, *, bounded: bool) -> str:
    """The program that Mosaic GPU makes of the kernel for an H200 that is not there."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from pallas_kernels.attention_prefill.mosaic_kernel import flash_attention

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    cache = array(2, 904, 2, d, dtype=jnp.bfloat16)
    arrays = [array(14, 2, 640, d, dtype=jnp.bfloat16), cache, cache]
    arrays += [array(2, 2, 640), array(2, 2, 640), array(2, 2, 10, 4), array(2, 2)]
    edges = (array(2, 2), array(4, config.block_n, 2, d, dtype=jnp.bfloat16))

    def run(arrays, edges):
        return flash_attention(
            *arrays, edges if bounded else None, scale=0.1, config=config, from_start=not bounded
        )

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(run).trace(arrays, edges).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_mosaic_fits_and_lowers(d, bounded):
    """Registers and spills of a Mosaic kernel come from the card; memory and features do not."""
    config = config_for(problem(d=d), H200, "mosaic")
    assert isinstance(config, MosaicConfig)
    assert config.shared_memory_bytes(d, 2) <= H200.shared_memory_per_block
    assert "mosaic_gpu" in mosaic_lowered(d, config, bounded=bounded)


def test_every_candidate_fits_its_card():
    for device in KNOWN_DEVICES:
        for case in (TINY_PREFILL, TINY_DECODE):
            found = case.candidates(device)
            assert found
            assert any(isinstance(c, MosaicConfig) for c in found) == (
                device is H200 and not case.decode
            )


@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_case_E7_configs_for_consumer_cards_fit(d):
    for op in ("attention_prefill", "attention_decode"):
        for dtype in ("bfloat16", "float32"):
            for device in (RTX_5090, Device("NVIDIA GeForce RTX 4090", "8.9")):
                itemsize = 4 if dtype == "float32" else 2
                config = config_for(problem(op, d=d, dtype=dtype), device)
                needed = config.shared_memory_bytes(d, itemsize, device.capability)
                assert needed <= 101_376
