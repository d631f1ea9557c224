"""What `implementation=None` runs, and that it can be asked; the optional extra's failures."""

import collections
import dataclasses
import json
import logging
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from eval.records import read_records
from pallas_kernels import explain
from pallas_kernels._attention.problem import AttentionProblem
from pallas_kernels._common import triton_support, tuned
from pallas_kernels._common.config import PersistentConfig, SmallConfig, TileConfig
from pallas_kernels._common.device import A100, CPU, H200, KNOWN_DEVICES, Device
from pallas_kernels._common.output_pruned import refusal
from pallas_kernels._common.problem import OPS
from pallas_kernels._common.testing import interpreted, random_mask
from pallas_kernels.dispatch import Problem, choose, config_for, default_config, facts
from tests.kernels.contract import ON_GPU

RESULTS = Path(__file__).parents[2] / "eval/results"

FFN = dict(m=16384, n=14336, k=4096, group=128)


def test_a_cpu_runs_the_reference():
    choice = explain("swiglu_up", **FFN, device=CPU)
    assert choice.implementation == "reference"
    assert choice.config is None
    assert "not a CUDA device" in choice.reason
    if not ON_GPU:
        problem = dict(m=4, n=64, k=32, group=16)
        assert explain("gemm_mn", **problem) == explain("gemm_mn", **problem, device=CPU)


def test_an_h200_runs_what_was_measured():
    half = explain("swiglu_up", **FFN, expected_sparsity=0.5, device=H200)
    assert half.implementation == "triton"
    assert half.measured
    assert isinstance(half.config, TileConfig)
    assert "took" in half.reason
    assert explain("swiglu_up", **FFN, device=H200) == half  # no hint means 50 %
    one = explain("swiglu_up", **FFN | {"m": 1}, expected_sparsity=0.5, device=H200)
    assert isinstance(one.config, SmallConfig)
    narrow = explain("swiglu_up", **FFN | {"group": 16}, expected_sparsity=0.5, device=H200)
    assert narrow.implementation == "dense"
    query = explain(
        "gemm_mn", m=16384, n=4096, k=4096, group=512, expected_sparsity=0.0, device=H200
    )
    assert query.implementation == "dense"


def test_measured_entries_choose_the_faster():
    """An entry's winner is at least as fast as dense, or is dense itself."""
    table = tuned.load(H200.kind)
    assert table.measured
    assert {entry.op for entry in table.entries} == set(OPS)
    kernels = [entry for entry in table.entries if entry.implementation != "dense"]
    # Between 2,048 and 16,384 tokens (97 of dense's 84 us, 346 of 745) lines through both cross.
    untimed = [entry.problem for entry in kernels if entry.ms is None]
    assert untimed == [Problem("gemm_k", 4096, 4096, 4096, 512, "bfloat16", 0.75)]
    for entry in kernels:
        if entry.ms is not None:
            assert entry.ms <= entry.dense_ms * 1.1, entry  # dense also pays for its zeros
    assert len({entry.key for entry in table.entries}) == len(table.entries)


def test_dispatch_takes_nothing_that_the_records_show_much_slower():
    """Products and attention, by the newest records of random masks: within 10 % of the best."""
    newest = collections.defaultdict(dict)
    for _, record in read_records(RESULTS / "kernels.jsonl"):
        op, shape = record["op"], record["shape"]
        if record["device"] != H200.kind or record["mask"] != "random":
            continue
        sparsity = round(4 * record["sparsity"]) / 4  # of the masks' target
        if op in ("gemm_mn", "swiglu_up", "gemm_k"):
            sizes = (shape[size] for size in ("m", "n", "k", "group"))
            problem = Problem(op, *sizes, record["dtype"], sparsity)
        elif op in ("attention_prefill", "attention_decode"):
            sizes = (shape[size] for size in ("b", "t", "tk", "hq", "hk", "d", "group"))
            problem = AttentionProblem(op, *sizes, record["dtype"], sparsity)
        else:
            continue
        newest[problem][record["implementation"]] = record["ms"]
    compared = collections.Counter()
    for problem, ms in newest.items():
        taken = choose(problem, H200).implementation
        compared[problem.op] += 1
        own = {name: ms[name] for name in ("dense", "triton", "mosaic") if name in ms}
        assert taken in own, f"{problem}: {taken} was never timed"
        assert ms[taken] <= 1.1 * min(own.values()), (problem, taken, own)
    assert min(compared.values()) >= 10
    assert len(compared) == 5


def test_other_devices_borrow_and_say_so():
    h100 = explain("swiglu_up", **FFN, device=Device("NVIDIA H100 80GB HBM3", "9.0"))
    assert h100.implementation == "triton"
    assert not h100.measured
    assert "NVIDIA H200" in h100.reason
    for device in (A100, Device("NVIDIA A10", "8.6"), Device("NVIDIA L4", "8.9")):
        assert not explain("swiglu_up", **FFN, device=device).measured
    unknown = explain("swiglu_up", **FFN, device=Device("NVIDIA B300", "10.3"))
    assert unknown.implementation == "triton"
    assert "no table" in unknown.reason
    old = explain("swiglu_up", **FFN, device=Device("Tesla V100", "7.0"))
    assert old.implementation == "dense"


def test_float16_borrows_bfloat16_and_float32_is_derived():
    half = explain("swiglu_up", **FFN, dtype="float16", device=H200)
    assert half.config == explain("swiglu_up", **FFN, device=H200).config
    assert not half.measured
    single = explain("swiglu_up", **FFN, dtype="float32", device=H200)
    assert "derived" in single.reason
    assert not single.measured


def test_odd_shapes_get_a_config_that_fits():
    for group in (1, 16, 48, 100, 512, 14336):
        for m in (1, 3, 64, 65, 10**6):
            for device in KNOWN_DEVICES:
                problem = Problem("swiglu_up", m, 14336, 100, group, "bfloat16")
                config = config_for(problem, device)
                limit = device.shared_memory_per_block
                assert config.shared_memory_bytes(2, 2, device.capability, m) <= limit
                assert config.block_n < 2 * max(group, 16)
                assert isinstance(config, SmallConfig) == (m <= 64)


def test_heuristic_is_pure_and_fits_small_shared_memory():
    problem = Problem("gemm_mn", 4096, 4096, 4096, 512, "bfloat16")
    small = default_config(problem, 48 * 1024, "8.0")
    assert small.shared_memory_bytes(2, 1, "8.0", 4096) <= 48 * 1024
    assert small == default_config(problem, 48 * 1024, "8.0")


@pytest.mark.parametrize(
    "config",
    [
        TileConfig(64, 32, 64, 4, 3, 8),
        PersistentConfig(128, 256, 64, 8, 3, 8, 132, compact=False),
        SmallConfig(16, 256, 4, 2),
    ],
    ids=str,
)
def test_config_json_round_trip(config):
    op = facts("gemm_mn")
    assert op.config_from_json(json.loads(json.dumps(op.config_to_json(config)))) == config


def test_bad_configs_are_refused():
    with pytest.raises(ValueError, match="block_m=48 must be a power of two"):
        TileConfig(48, 32, 64, 4, 3)
    with pytest.raises(ValueError, match="num_stages=0"):
        SmallConfig(16, 32, 4, 0)
    with pytest.raises(ValueError, match="unknown config form 'huge'"):
        facts("gemm_mn").config_from_json({"form": "huge"})
    with pytest.raises(ValueError, match="does not fit TileConfig"):
        facts("gemm_mn").config_from_json({"form": "tile", "blocks": 3})
    layout = pallas_kernels.mask_layout(jnp.ones((4, 2), bool))
    x = w = jnp.ones((4, 4))
    with pytest.raises(ValueError, match="no tile sizes"):
        pallas_kernels.gemm_mn(
            x, w, layout, implementation="dense", config=SmallConfig(16, 16, 4, 1)
        )
    with pytest.raises(ValueError, match="name the implementation"):
        pallas_kernels.gemm_mn(x, w, layout, config=SmallConfig(16, 16, 4, 1))


def test_a_users_own_table_comes_first(tmp_path, monkeypatch):
    problem = Problem("swiglu_up", **FFN, dtype="bfloat16", expected_sparsity=0.5)
    table = tuned.Table(H200.kind, "9.0", True, (tuned.Entry(problem, "dense", None),))
    tuned.write(table, tmp_path / tuned.file_name(H200.kind))
    other = dict(m=16384, n=4096, k=4096, group=512, device=H200)
    ours = explain("gemm_mn", **other)
    monkeypatch.setenv(tuned.USER_TABLES, str(tmp_path))
    tuned.load.cache_clear()
    try:
        assert tuned.load(H200.kind).entries[0] == table.entries[0]
        assert explain("swiglu_up", **FFN, device=H200).implementation == "dense"
        assert explain("gemm_mn", **other) == ours  # what the user has not tuned is the package's
    finally:
        tuned.load.cache_clear()


def test_an_entry_of_a_kernel_has_its_config():
    problem = Problem("swiglu_up", **FFN, dtype="bfloat16", expected_sparsity=0.5)
    with pytest.raises(ValueError, match="triton won, but with what config"):
        tuned.Entry(problem, "triton", None)


def test_unknown_ops_and_shapes_are_refused():
    with pytest.raises(ValueError, match="unknown op='gemm'; known: attention_decode"):
        explain("gemm", **FFN)
    with pytest.raises(TypeError, match="group"):
        explain("gemm_mn", m=1, n=2, k=3)


def test_case_F4_without_triton_xla_runs_with_a_notice(monkeypatch, caplog):
    monkeypatch.setattr(triton_support, "available", lambda: False)
    with caplog.at_level(logging.WARNING):
        choice = explain("swiglu_up", **FFN, device=H200)
    assert choice.implementation == "dense"
    assert "not installed" in choice.reason
    assert "not installed" in caplog.text


def test_case_F4_a_failing_import_names_both_versions(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)  # importing it now raises
    with pytest.raises(NotImplementedError, match=r"jax-triton .*triton .*tested with"):
        triton_support.load()


def test_importing_the_package_needs_neither_triton_nor_a_device():
    code = (
        "import sys, pallas_kernels\n"
        "assert not {'triton', 'jax_triton', 'jax.experimental.pallas'} & set(sys.modules)\n"
        "import jax\n"
        "assert not jax._src.xla_bridge._backends, 'importing started a backend'\n"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there the kernels run")
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_a_kernel_named_on_a_cpu_raises(implementation):
    layout = pallas_kernels.mask_layout(jnp.ones((4, 2), bool))
    with pytest.raises(NotImplementedError, match=r"capability 8\.0 or later, this one has None"):
        pallas_kernels.gemm_mn(
            jnp.ones((4, 4)), jnp.ones((4, 4)), layout, implementation=implementation
        )


def test_offsets_are_wide_exactly_where_an_array_passes_2_31_elements():
    from pallas_kernels._common.triton_gemm import arguments

    config = TileConfig(128, 128, 64, 8, 3)

    def wide(m, n, k, groups):
        seen = []

        def trace(x, w, mask):
            layout = pallas_kernels.mask_layout(mask)
            seen.append(arguments(x, (w,), None, layout, n // groups, config).constants["WIDE"])

        shapes = (((m, k), jnp.bfloat16), ((n, k), jnp.bfloat16), ((m, groups), jnp.bool_))
        jax.eval_shape(trace, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        return seen[0]

    assert not wide(131_072, 4096, 16_383, 8)
    assert wide(131_072, 4096, 16_384, 8)
    assert wide(128, 151_936, 14_336, 8)


def test_the_persistent_form_says_what_it_cannot_run():
    config = PersistentConfig(128, 256, 64, 8, 3, 8, 132, compact=True)
    problem = Problem("gemm_mn", 4096, 4096, 4096, 512, "bfloat16")
    assert refusal(config, problem, "9.0") is None
    refused = {
        "capability 9": refusal(config, problem, "8.0"),
        "not float32": refusal(config, dataclasses.replace(problem, dtype="float32"), "9.0"),
        "multiples of 64 from 128": refusal(config, dataclasses.replace(problem, k=4000), "9.0"),
        "8 channels": refusal(config, dataclasses.replace(problem, group=100), "9.0"),
        "32-bit offsets": refusal(config, dataclasses.replace(problem, m=2**20), "9.0"),
    }
    for words, reason in refused.items():
        assert words in reason
    with pytest.raises(ValueError, match="block_m=64 must be 16 rows a warp"):
        PersistentConfig(64, 256, 64, 8, 3, 8, 132, compact=True)
    x = w = jnp.ones((64, 128), jnp.bfloat16)
    layout = pallas_kernels.mask_layout(jnp.ones((64, 4), bool))
    with interpreted(), pytest.raises(NotImplementedError, match="no interpreter"):
        pallas_kernels.gemm_mn(x, w[:64], layout, implementation="triton", config=config)


def test_wide_offsets_give_the_same_result(monkeypatch):
    """The kernel body with 64-bit offsets, forced on a small shape."""
    from pallas_kernels._common import triton_gemm

    original = triton_gemm.arguments

    def forced(*args):
        call = original(*args)
        return dataclasses.replace(call, constants=call.constants | {"WIDE": True})

    monkeypatch.setattr(triton_gemm, "arguments", forced)
    x = jax.random.normal(jax.random.key(0), (80, 48))
    w = jax.random.normal(jax.random.key(1), (64, 48))
    layout = pallas_kernels.mask_layout(random_mask(jax.random.key(2), 80, 2, 0.5))
    with interpreted():
        y = pallas_kernels.gemm_mn(x, w, layout, implementation="triton")
    expected = pallas_kernels.gemm_mn(x, w, layout, implementation="reference")
    assert jnp.allclose(y, expected, atol=1e-4)
