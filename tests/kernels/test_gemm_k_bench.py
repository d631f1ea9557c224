"""`gemm_k` in the benchmark and the tuner, end to end on tiny shapes with a fake clock."""

import pytest

import eval.bench_kernels
import eval.kernels_beside
import eval.tune_kernels
from eval.bench_kernels import BenchConfig
from eval.kernel_cases import FAMILIES
from eval.kernel_timing import Timing
from eval.tune_kernels import TuneConfig
from pallas_kernels._common.device import A100, H200, KNOWN_DEVICES
from pallas_kernels._common.shapes import GemmShape
from pallas_kernels._common.testing import interpreted

TINY = {"tiny": GemmShape(n=32, k=64, group=32)}
OPS = ("gemm_k", "gemm_k_o")


@pytest.fixture
def fake_gpu(monkeypatch):
    """Kernels in their interpreters, an H200 by name, and every contender slower than the last."""

    def clock(contenders, rounds=30):
        return {name: Timing((1.0 + i,) * rounds) for i, name in enumerate(contenders)}

    for module in (eval.bench_kernels, eval.tune_kernels):
        monkeypatch.setattr(module, "current_device", lambda: H200)
    for module in (eval.bench_kernels, eval.kernels_beside, eval.tune_kernels):
        monkeypatch.setattr(module, "time_interleaved", clock)
    # The kernels' choices: without the persistent form, which has no interpreter.
    monkeypatch.setattr("pallas_kernels.dispatch.current_device", lambda: A100)
    cases = "eval.kernel_cases.input_pruned"
    monkeypatch.setattr(f"{cases}.ONE_TOKEN", ((16, 32, 4, 1),))
    monkeypatch.setattr(f"{cases}.TILES", ((32, 32, 4, 2, ((2, 4),)),))
    monkeypatch.setattr(f"{cases}.DOWN_SHAPES", TINY)
    monkeypatch.setattr(f"{cases}.OUTPUT_SHAPES", {"tiny": GemmShape(n=32, k=128, group=32)})
    monkeypatch.setattr("eval.kernel_cases.base.COLD_BYTES", 10_000)
    with interpreted():
        yield


def test_the_tuner_measures_both_projections(fake_gpu, tmp_path):
    config = TuneConfig(
        tmp_path, model="tiny", ops=OPS, tokens=(1, 70), groups=(32,), sparsities=(0.5,), rounds=2
    )
    table = eval.tune_kernels.main(config)
    assert {(e.op, *e.problem.shape.values()) for e in table.entries} == {
        ("gemm_k", m, 32, k, 32) for m in (1, 70) for k in (64, 128)
    }
    assert all(e.implementation == "dense" and e.config is not None for e in table.entries)


def test_the_benchmark_writes_records_of_right_results(fake_gpu, tmp_path):
    config = BenchConfig(
        json=tmp_path / "kernels.jsonl",
        model="tiny",
        ops=OPS,
        tokens=(1, 70),
        groups=(32,),
        sparsities=(0.0, 0.5),
        masks=("random",),
        naive_tokens=(70,),
        naive_groups=(32,),
        rounds=2,
    )
    rows = [r for r in eval.bench_kernels.main(config) if r["op"] == "gemm_k"]
    assert {r["case"] for r in rows} == {"down", "o"}
    assert {"gather-scatter", "ragged_dot", "triton", "dense"} <= {
        r["implementation"] for r in rows
    }
    errors = [r["rel_error"] for r in rows if r["rel_error"] is not None]
    assert errors
    assert max(errors) < 1e-2


def test_candidates_fit_every_card():
    for device in KNOWN_DEVICES:
        for m in (1, 8, 64, 16384):
            for group in (16, 128, 512):
                case = FAMILIES["gemm_k"].make(m, group, "llama-3.1-8b")
                found = case.candidates(device)
                assert found, (device, case)
                assert all(c.block_k <= group for c in found if m > 1)
