"""The benchmark and the tuner, end to end on tiny shapes with a fake clock: what they write."""

import dataclasses
import itertools
import json

import pytest

import eval.bench_kernels
import eval.kernels_beside
import eval.tune_kernels
from eval import records
from eval.bench_kernels import BenchConfig
from eval.kernel_cases import FAMILIES
from eval.kernel_plots import newest, table_figure, write_plots
from eval.kernel_timing import WARM_UP, Compiled, Timing, compile_all, time_interleaved
from eval.tune_kernels import TuneConfig
from pallas_kernels._common import tuned
from pallas_kernels._common.device import A100, CPU, H200, KNOWN_DEVICES
from pallas_kernels._common.shapes import GemmShape
from pallas_kernels._common.testing import interpreted

TINY = GemmShape(n=64, k=32, group=32)
CASES = "eval.kernel_cases.output_pruned"


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
    monkeypatch.setattr(f"{CASES}.ONE_TOKEN", ((16, 32, 4, 1),))
    monkeypatch.setattr(f"{CASES}.TILES", ((32, 32, 32, 4, 2, (2, 4)),))
    monkeypatch.setattr(f"{CASES}.QUERY_SHAPES", {"tiny": TINY})
    monkeypatch.setattr(f"{CASES}.FFN_SHAPES", {"tiny": TINY})
    monkeypatch.setattr("eval.kernel_cases.base.COLD_BYTES", 10_000)
    with interpreted():
        yield


def tune_config(folder):
    return TuneConfig(
        out=folder,
        model="tiny",
        ops=("gemm_mn", "swiglu_up"),
        tokens=(1, 70),
        groups=(32,),
        sparsities=(0.0, 0.5),
        rounds=2,
    )


def test_tuner_writes_every_problem_and_resumes(fake_gpu, tmp_path, monkeypatch):
    table = eval.tune_kernels.main(tune_config(tmp_path))
    path = tmp_path / "nvidia_h200.json"
    assert tuned.read(path.read_text()) == table
    assert table.measured
    assert {(*entry.key[:6], entry.sparsity) for entry in table.entries} == {
        (op, "bfloat16", m, 64, 32, group, s)
        for op, group in (("gemm_mn", 32), ("swiglu_up", 32))
        for m in (1, 70)
        for s in (0.0, 0.5)
    }
    assert all(entry.implementation == "dense" for entry in table.entries)  # by the fake clock
    assert all(entry.config is not None for entry in table.entries)

    # A second run measures only what is missing.
    kept = [e for e in table.entries if (e.problem.m, e.sparsity) != (70, 0.5)]
    data = json.loads(path.read_text())
    data["entries"] = [e for e in data["entries"] if (e["m"], e["sparsity"]) != (70, 0.5)]
    path.write_text(json.dumps(data))
    measured = []
    trial = eval.tune_kernels.trial

    def counting(case, sparsities, device):
        measured.append((case.facts.op, case.facts.m, tuple(sparsities)))
        return trial(case, sparsities, device)

    monkeypatch.setattr(eval.tune_kernels, "trial", counting)
    again = eval.tune_kernels.main(tune_config(tmp_path))
    assert measured == [("gemm_mn", 70, (0.5,)), ("swiglu_up", 70, (0.5,))]
    assert set(again.entries) >= set(kept)
    assert len(again.entries) == len(table.entries)


def test_tuner_stops_at_a_wrong_kernel(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(eval.tune_kernels, "relative_error", lambda a, b: float("nan"))
    with pytest.raises(RuntimeError, match="differs from dense by nan"):
        eval.tune_kernels.main(tune_config(tmp_path))


def test_the_tuner_says_what_could_not_run(fake_gpu, tmp_path, monkeypatch, capsys):
    """Nothing is skipped in silence: the candidate, why, how many; the problem keeps its entry."""
    found = eval.tune_kernels.compile_all

    def one_fails(functions, workers):
        compiled, failures = found(functions, workers=workers)
        names = [key for key in compiled if "SmallConfig" in key[1]]
        lost = {key: ValueError("too much shared memory") for key in names}
        return {k: c for k, c in compiled.items() if k not in lost}, failures | lost

    monkeypatch.setattr(eval.tune_kernels, "compile_all", one_fails)
    few = dataclasses.replace(
        tune_config(tmp_path), ops=("gemm_mn",), tokens=(1,), sparsities=(0.5,)
    )
    (entry,) = eval.tune_kernels.main(few).entries
    assert (entry.implementation, entry.config) == ("dense", None)
    said = " ".join(capsys.readouterr().out.split())
    assert "not run: Product(m=1, n=64, k=32, group=32" in said
    assert "SmallConfig(block_n=16" in said
    assert "too much shared memory" in said
    assert "1 candidates could not run" in said


def test_candidates_fit_every_card():
    for device in KNOWN_DEVICES:
        for op in ("gemm_mn", "swiglu_up"):
            for m in (1, 8, 64, 16384):
                for group in (128, 512):
                    case = FAMILIES[op].make(m, group, "llama-3.1-8b")
                    found = case.candidates(device)
                    assert found, (device, case)
                    tiled = [c for c in found if getattr(c, "compact", True)]
                    assert tiled, (device, case)
                    assert all(config.block_n <= group for config in tiled)


def test_benchmark_writes_complete_records_and_plots(fake_gpu, tmp_path):
    path = tmp_path / "kernels.jsonl"
    config = BenchConfig(
        json=path,
        plots=tmp_path,
        model="tiny",
        ops=("gemm_mn", "swiglu_up"),
        tokens=(1, 70),
        groups=(32, 64),
        sparsities=(0.0, 0.5),
        naive_tokens=(1, 70),
        naive_groups=(64,),
        rounds=2,
    )
    rows = eval.bench_kernels.main(config)
    written = [record for _, record in records.read_records(path)]
    assert len(written) == len(rows)
    products = [r for r in written if r["op"] in ("gemm_mn", "swiglu_up")]
    cells = {(r["op"], r["shape"]["m"], r["shape"]["group"], r["sparsity"]) for r in products}
    assert len(cells) >= 12
    for row in products:
        assert row["speedup"] == row["dense_ms"] / row["ms"]
        assert row["includes_layout"] is False
        if row["rel_error"] is not None:
            assert row["rel_error"] < 1e-2
    naive = {r["implementation"] for r in products if r["shape"]["group"] == 64}
    assert {"gather-scatter", "ragged_dot", "pallas", "triton", "dense"} <= naive
    assert sum(r["dispatched"] for r in products) == len(
        {(r["op"], str(r["shape"]), r["expected_sparsity"], r["mask"]) for r in products}
    )
    assert all(p.stat().st_size > 10_000 for p in write_plots(rows, tmp_path / "again"))


def test_plots_show_the_last_run_of_every_cell():
    cell = {"op": "gemm_mn", "case": "q", "shape": {"m": 8, "group": 64}, "dtype": "bfloat16"}
    cell |= {"expected_sparsity": 0.5, "mask": "random"}
    old = [
        cell | {"time": "1", "ms": ms, "implementation": name} for ms, name in ((1, "a"), (2, "b"))
    ]
    new = [
        cell | {"time": "2", "ms": ms, "implementation": name} for ms, name in ((3, "a"), (4, "c"))
    ]
    other = cell | {"time": "1", "ms": 5, "mask": "clustered"}
    copies = [{"op": "copy", "case": "copy", "shape": {"bytes": 1}, "time": t} for t in "12"]
    found = newest([*new, copies[0], *old, other, copies[1]])
    assert sorted(row["ms"] for row in found if "ms" in row) == [3, 4, 5]
    assert [row for row in found if row["op"] == "copy"] == copies  # all: the best is the roof


def test_a_tables_plot_names_every_token_count():
    table = tuned.load("NVIDIA H200")
    assert table is not None
    figure = table_figure(table)
    timed = {e.problem.shape["m"] for e in table.entries if e.ms and "m" in e.problem.shape}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"{m:,}" for m in sorted(timed)]


@pytest.mark.parametrize("command", [eval.bench_kernels, eval.tune_kernels])
def test_nothing_is_measured_without_a_gpu(command, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "current_device", lambda: CPU)
    config = TuneConfig(tmp_path) if command is eval.tune_kernels else BenchConfig()
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        command.main(config)


def test_the_clock_refuses_a_profile_without_kernels():
    compiled, failed = compile_all({"add": (lambda x: x + 1, (1.0,))})
    assert not failed
    with pytest.raises(RuntimeError, match="0 kernels for 2 rounds"):
        time_interleaved({"add": (compiled["add"], [(1.0,)])}, rounds=2)


def test_the_clock_gives_every_contender_its_own_kernels(monkeypatch):
    """Two contenders share a function; each round begins with uncounted calls of the last."""
    compiled, failed = compile_all({"a": (lambda x: x + 1, (1.0,)), "b": (lambda x: x - 1, (1.0,))})
    assert not failed
    a, b = compiled["a"], compiled["b"]
    # Per round: b (uncounted, 2 kernels), a for x, b for y, a for z, b for w.
    ns = {a.module: [], b.module: []}
    for i in range(3):
        ns[b.module] += [1e9, 1e9] * WARM_UP + [10 + i, 20 + i, 30 + i, 40 + i]
        ns[a.module] += [1 + i, 5 + i]
    monkeypatch.setattr("eval.kernel_timing._kernel_durations", lambda files: ns)
    sets = [(1.0,)]
    timings = time_interleaved({"x": (a, sets), "y": (b, sets), "z": (a, sets), "w": (b, sets)}, 3)
    found = {name: [round(ms * 1e6) for ms in t.samples_ms] for name, t in timings.items()}
    assert found == {"x": [1, 2, 3], "y": [30, 32, 34], "z": [5, 6, 7], "w": [70, 72, 74]}


def test_neighbours_never_get_the_same_arguments(monkeypatch):
    """What one contender has just read must not be in the cache for the next."""
    given = []
    compiled = Compiled(lambda *arguments: given.append(arguments) or 0.0, "module", 0, 0)
    calls = 2 * (WARM_UP + 3)
    monkeypatch.setattr(
        "eval.kernel_timing._kernel_durations", lambda files: {"module": [1.0] * calls}
    )
    sets = [(i,) for i in range(2)]
    time_interleaved({name: (compiled, sets) for name in "abc"}, 2)
    assert len(given) == calls
    assert all(one != other for one, other in itertools.pairwise(given))


def test_derived_tables_are_those_checked_in(tmp_path):
    """The unmeasured tables are the model's output, nothing else."""
    for path in eval.tune_kernels.write_derived(TuneConfig(tmp_path)):
        fresh = tuned.read(path.read_text())
        assert not fresh.measured
        assert fresh.model == eval.tune_kernels.DERIVATION
        assert fresh == tuned.load(fresh.device_kind)
    assert A100.kind in {t.kind for t in KNOWN_DEVICES}
