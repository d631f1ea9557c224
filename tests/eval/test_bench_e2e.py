"""The end-to-end benchmark: its cells, its ideals, what it refuses. Times on a CPU mean nothing."""

import dataclasses
import functools
import io
import itertools
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

import pallas_kernels
from eval import bench_e2e, e2e_generate, e2e_plots, records
from eval.bench_e2e import (
    E2EConfig,
    cell,
    generated,
    line,
    measure,
    prompt_ids,
    refusal,
    table,
    tokens_needed,
)
from eval.carried_masks import carried_variants, source_masks
from eval.e2e_generate import routed_variant, time_generate
from eval.e2e_plots import write_plots
from eval.e2e_runs import (
    Models,
    compile_all,
    dense_variants,
    empty_cache,
    forced_variant,
    order,
    part_of,
    random_cache,
    random_model,
    turns,
)
from tests.eval.conftest import tiny_model
from wide_jax.cli import bench_e2e as bench_e2e_command
from wide_jax.cli.main import main
from wide_jax.config import WideConfig
from wide_jax.engine import split_on
from wide_jax.generate import generate
from wide_jax.hf.pretrained import new_routers, tensors_of, without_routers
from wide_jax.hf.save import save_model
from wide_jax.hf.wide_folder import save_wide_model
from wide_jax.kernels import Kernels, SparsityHints
from wide_jax.shapes import SHAPES, shape

TINY = dataclasses.replace(
    shape("smollm2-135m"),
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
SOURCE = dataclasses.replace(TINY, num_hidden_layers=3)
BENCH = E2EConfig(tokens=(16,), batches=(2,), sparsities=(0.0, 0.5), ffn_groups=(16,), steps=2)
# XLA's products without cuDNN, which a CPU does not have.
WITHOUT_CUDNN = Kernels(gemm_mn="dense", swiglu_up="dense", gemm_k="dense")
DENSE = [
    dense_variants()[0],
    dataclasses.replace(dense_variants()[1], kernels=WITHOUT_CUDNN),
]


def trained_model():
    """Another model than is timed: three layers of two groups of heads, two of channels."""
    return random_model(SOURCE, WideConfig.for_model(SOURCE, ffn_group_size=32), seed=1)


@pytest.fixture(scope="module")
def rows():
    wide = WideConfig.for_model(TINY, ffn_group_size=16)
    model = random_model(TINY, wide)
    assert model.model.layers[0].mlp.up_proj.weight[...].dtype == jnp.bfloat16
    bench = dataclasses.replace(BENCH, rounds=1)
    ids = prompt_ids(64, 2, 16, None)
    source = source_masks(trained_model(), range(50), 2 * 16 + 2, fingerprint="sha256:source")
    more = carried_variants(source, TINY, wide, 2, 16, steps=2)
    # Compiling ahead puts descriptions of arrays where run-time checks expect arrays.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return list(cell(Models.of(model), wide, ids, bench, own=True, dense=DENSE, more=more))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_every_variant_is_compared_with_the_best_dense(rows):
    assert [(r["phase"], r["variant"], r["mask"]) for r in rows] == [
        (phase, *variant)
        for phase in ("prefill", "decode")
        for variant in (
            ("dense", "none"),
            ("dense-xla", "none"),
            ("wide", "random"),
            ("wide", "random"),
            ("wide", "trained"),
            ("wide", "trained_statistics"),
            ("wide", "random_same_rates"),
        )
    ]
    for phase in ("prefill", "decode"):
        found = [r for r in rows if r["phase"] == phase]
        best = min(r["ms"] for r in found if r["variant"].startswith("dense"))
        assert all(r["dense_ms"] == best for r in found)
        assert all(r["speedup"] == pytest.approx(best / r["ms"]) for r in found)


def test_carried_masks_are_recorded_with_where_they_come_from(rows):
    for phase in ("prefill", "decode"):
        own, random = [r for r in rows if r["phase"] == phase and r["masks_of"] is not None]
        assert (own["mask"], random["mask"]) == ("trained_statistics", "random_same_rates")
        about = own["masks_of"]
        assert about["fingerprint"] == "sha256:source"
        assert (about["window"], about["text_tokens"]) == (34, 50)
        assert about["places"] == {"layers": 3, "attention": 2, "ffn": 2}
        assert about["repeats"] == {"layers": [0, 1], "attention": [1, 1], "ffn": [2, 2]}
        assert about["step_token"] in (0, 1)
        # The only difference is which tokens and groups: layer by layer as many are skipped.
        assert own["rates"] == random["rates"]
        assert 0.0 < own["sparsity"] < 1.0
        rates = [np.mean(own["rates"][module]) for module in ("attention", "ffn")]
        assert own["sparsity"] == pytest.approx(np.mean(rates))
    assert all((r["rates"] is None) == (r["mask"] == "none") for r in rows)
    for row in rows:
        if row["mask"] != "none":
            assert row["accounting"]["paper"] == pytest.approx(row["sparsity"])
    assert own["masks_of"]["agreement"] != random["masks_of"]["agreement"]


def test_ideals_come_from_the_masks(rows):
    for row in rows:
        assert row["mask"] != "random" or abs(row["sparsity"] - 0.5) < 0.2 or row["sparsity"] == 0
        if row["mask"] == "none":
            assert row["ideal_speedup"] == 1.0
        elif row["sparsity"] == 0.0:
            assert 0.5 < row["ideal_speedup"] < 1.0  # routers cost, nothing is saved
        else:
            assert row["sparsity"] > 0.1
    pruned = [r for r in rows if r["mask"] == "random" and r["sparsity"] > 0]
    assert all(r["ideal_speedup"] > 1.0 for r in pruned if r["phase"] == "prefill")


def test_rows_are_records_a_table_and_plots(rows, tmp_path):
    for row in rows:
        record = records.common_fields("e2e") | {"model": "tiny"} | row
        records.append_record(tmp_path / "e2e.jsonl", record)
        assert "B=2 T=16 G=16" in line(record)
    assert table([{"model": "tiny"} | r for r in rows]).row_count == len(rows)
    single = [r | {"batch": 1} for r in rows]
    paths = write_plots(single, tmp_path)
    assert len(paths) == 3
    assert all(path.stat().st_size > 1000 for path in paths)
    waits = [r | {"phase": "ttft"} for r in single]
    assert write_plots(rows + waits, tmp_path / "none") == []  # of two sequences; not drawn
    assert not (tmp_path / "none").exists()


def test_the_documents_plots_are_of_one_context_and_one_group_size(rows, tmp_path, monkeypatch):
    """By length the group size of most lengths; the rest at one context; half a model in none."""
    named = records.common_fields("e2e") | {"model": e2e_plots.MODEL, "device": e2e_plots.DEVICE}
    cells = [(n, 128, 4) for n in (1_024, 16_384, 65_536)] + [(16_384, 64, 4), (16_384, 64, 2)]
    for tokens, group, layers in cells:
        for row in rows:
            cell = {"tokens": tokens, "ffn_group": group, "layers": layers, "batch": 1}
            records.append_record(tmp_path / "e2e.jsonl", named | row | cell)
    drawn, panels = [], e2e_plots._panels

    def watching(rows, **options):
        drawn.append({(r["tokens"], r["ffn_group"], r["layers"]) for r in rows})
        return panels(rows, **options)

    monkeypatch.setattr(e2e_plots, "_panels", watching)
    assert len(e2e_plots.main(tmp_path / "e2e.jsonl", tmp_path)) == 3
    by_sparsity, by_length, by_group = drawn
    assert by_sparsity == by_group == {(16_384, 128, 4), (16_384, 64, 4)}
    assert by_length == {(n, 128, 4) for n in (1_024, 16_384, 65_536)}


def test_memory_is_of_each_variants_own_program(rows):
    """Weights and cache are arguments of all; routers and masks only of those that use them."""
    model = random_model(TINY, WideConfig.for_model(TINY, ffn_group_size=16))
    cache = sum(x.nbytes for x in jax.tree.leaves(empty_cache(TINY, 2, 18)))
    routed, dense = (
        sum(x.nbytes for x in jax.tree.leaves(nnx.state(m)))
        for m in (model, without_routers(model))
    )
    held = {}  # beside what a program needs between
    for row in (row for row in rows if row["phase"] == "prefill"):
        kind = row["variant"], row["mask"], row["sparsity"] > 0
        held[kind] = 2**30 * (row["peak_gib"] - row["temporary_gib"])
    small = 300  # prompts, lengths, drawn tokens
    masks = 2 * 16 * TINY.num_hidden_layers * (2 + 4)  # booleans
    assert 0 <= held["dense", "none", False] - (dense + cache) < small
    assert 0 <= held["wide", "trained", True] - (routed + cache) < small
    assert 0 <= held["wide", "random", False] - (dense + cache + masks) < small  # routers off
    assert 0 <= held["wide", "random", True] - (routed + cache + masks) < small


def test_dense_runs_without_routers_and_shares_the_weights():
    model = random_model(TINY, WideConfig.for_model(TINY, ffn_group_size=16))
    models = Models.of(model)
    weights = jax.tree.leaves(models.split(DENSE[0])[1])
    every = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(nnx.state(model))}
    assert {x.unsafe_buffer_pointer() for x in weights} < every
    routed = models.split(routed_variant(model, own=False))[1]
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(routed)} == every
    assert Models.of(models.dense).dense is models.dense


def test_generate_is_timed_as_its_caller_sees_it(monkeypatch):
    """With a clock that a prompt advances by 5 and a token by 3, of the pruned model by 2."""
    model = random_model(TINY, WideConfig.for_model(TINY, ffn_group_size=16))
    now, calls = [0.0], []

    def generating(ready, prompts, *, max_new_tokens, on_tokens=None, **options):
        calls.append((ready.graphdef, max_new_tokens, options["prefill_chunk"]))
        now[0] += 5.0
        token = 3.0 if ready.graphdef == calls[0][0] else 2.0

        def seen(tokens):
            now[0] += token * len(tokens[0])
            on_tokens(tokens)

        told = None if on_tokens is None else seen
        made = generate(ready, prompts, max_new_tokens=max_new_tokens, on_tokens=told, **options)
        if on_tokens is None:
            now[0] += token * max_new_tokens
        return made

    variants = [DENSE[1], routed_variant(model, own=False)]
    ids = np.arange(32).reshape(2, 16)
    monkeypatch.setattr(e2e_generate, "generate", generating)
    timed = functools.partial(
        time_generate, Models.of(model), variants, ids, steps=4, prefill_chunk=8,
        clock=lambda: now[0],
    )  # fmt: skip
    dense, wide = timed(rounds=2, seconds=1e9)
    # One call of each kind compiles, two rounds warm up, three count.
    assert [call[1:] for call in calls] == [(1, 8), (8, 8)] * 12
    compiling, calls = calls[:4], calls[4:]
    first, second = calls[0][0], calls[2][0]
    assert first != second
    assert [call[0] for call in compiling] == [first, first, second, second]
    alternating = [first, second, second, first] * 2 + [first, second]
    assert [call[0] for call in calls[::2]] == alternating
    assert dense.samples_ms == {"ttft": 3 * (8e3,), "tpot": 3 * (3e3,)}
    assert wide.samples_ms == {"ttft": 3 * (7e3,), "tpot": 3 * (2e3,)}
    assert dense.usage == {"ttft": None, "tpot": None}
    assert float(wide.usage["ttft"].tokens) == 32
    assert float(wide.usage["tpot"].tokens) == 2 * 7  # the last token drawn is never run


@pytest.mark.parametrize("batch", [1, 2])
def test_the_first_token_and_each_after_it_are_rows_of_a_cell(batch, tmp_path):
    wide = WideConfig.for_model(TINY, ffn_group_size=16)
    models = Models.of(random_model(TINY, wide))
    bench = dataclasses.replace(BENCH, phases=(), generate=True, rounds=3)
    ids = prompt_ids(64, batch, 16, None)
    found = list(generated(models, wide, ids, bench, own=False, dense=DENSE))
    assert [(r["phase"], r["variant"], r["mask"]) for r in found] == [
        (phase, *variant)
        for phase in ("ttft", "tpot")
        for variant in (("dense", "none"), ("dense-xla", "none"), ("wide", "random_routers"))
    ]
    for row in found:
        record = records.common_fields("e2e") | {"model": "tiny"} | row
        records.append_record(tmp_path / "e2e.jsonl", record)
        assert "compiled" not in line(record)
        assert (row["accounting"] is None) == (row["mask"] == "none")
        unknown = row["phase"] == "tpot" and batch > 1 and row["mask"] != "none"
        assert (row["ideal_speedup"] is None) == unknown  # what the steps of several rows read
        assert ("ideal" in line(record)) != unknown
        if row["mask"] != "none":
            assert row["accounting"]["paper"] == row["sparsity"] > 0
            assert row["ideal_speedup"] != 1.0
    assert table([{"model": "tiny"} | row for row in found]).row_count == 6


def test_steps_alone_make_no_masks_of_a_prompt(monkeypatch):
    """Those of a long one would fill memory that the cell is not refused for."""
    wide = WideConfig.for_model(TINY, ffn_group_size=16)
    models, asked = Models.of(random_model(TINY, wide)), []

    def forced(config, wide, batch, tokens, sparsity):
        asked.append(tokens)
        return forced_variant(config, wide, batch, tokens, sparsity)

    monkeypatch.setattr(bench_e2e, "forced_variant", forced)
    monkeypatch.setattr(bench_e2e, "_phase", lambda models, variants, *rest: [])
    monkeypatch.setattr(bench_e2e, "_rows", lambda *rest: iter(()))
    for phases in (("decode",), ("prefill", "decode")):
        bench = dataclasses.replace(BENCH, phases=phases, sparsities=(0.5,))
        list(cell(models, wide, prompt_ids(64, 2, 16, None), bench, own=False, dense=DENSE))
    assert asked == [1, 16]


def test_turns_count_after_two_and_fit_the_time():
    now = [0.0]

    def taken(rounds, seconds):
        found = []
        for counts, _ in turns(1, rounds, seconds, lambda: now[0]):
            found.append(counts)
            now[0] += 1.0
        return found

    assert taken(5, 100.0) == 2 * [False] + 5 * [True]
    assert taken(1, 100.0) == 2 * [False] + 3 * [True]
    assert taken(9, 4.5) == 2 * [False] + 5 * [True]
    assert taken(9, 1.0) == 2 * [False] + 3 * [True]
    assert taken(9, 0.9) == [False] + 3 * [True]  # a long round is warm after one
    assert [counts for counts, _ in turns(2, 3, 0.0)] == [False] + 3 * [True]  # by a real clock


@pytest.mark.parametrize(
    ("contenders", "rounds"), [(1, 1), (2, 2), (3, 6), (4, 4), (5, 10), (6, 6)]
)
def test_every_contender_follows_every_other_equally_often(contenders, rounds):
    """Whoever comes after a heavy run finds a card at its power limit."""
    orders = [order(contenders, turn) for turn in range(rounds)]
    assert all(sorted(found) == list(range(contenders)) for found in orders)
    pairs = Counter(pair for found in orders for pair in itertools.pairwise(found))
    others = contenders * (contenders - 1)
    assert len(pairs) == others
    assert set(pairs.values()) <= {rounds // contenders}
    assert [found for _, found in turns(contenders, 3, 60.0)][:rounds] == orders[:5]


def test_programs_from_the_compile_cache_are_told_from_compiled_ones(tmp_path):
    def call(n):
        return jax.jit(lambda x: x * n), (jnp.ones(3),)

    before = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        for together in (True, False):
            assert [r.from_cache for r in compile_all([call(3.25)], together=together)] == [
                not together
            ]
        both = compile_all([call(3.25), call(5.5)], together=True)
        assert [r.from_cache for r in both] == [True, False]
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        compilation_cache.reset_cache()


def test_a_random_context_is_as_long_as_it_says():
    cache = random_cache(TINY, 2, 16, 18)
    assert cache.lengths.tolist() == [16, 16]
    assert all(0.5 < float(layer.keys.std()) < 2 for layer in cache.layers)
    assert float(jnp.abs(cache.layers[0].keys - cache.layers[1].keys).max()) > 0.1


def test_a_variant_leaves_the_models_own_kernels_as_they_were():
    model = random_model(TINY, WideConfig.for_model(TINY, ffn_group_size=16))
    model.kernels = own = Kernels(SparsityHints(0.5, 0.25))
    for variant in dense_variants():
        graphdef, state = split_on(model, variant.kernels)
        assert nnx.merge(graphdef, state).kernels == variant.kernels
        assert model.kernels == own


def test_prompts_are_the_texts_pieces():
    assert prompt_ids(64, 2, 3, [1, 2, 3, 4]).tolist() == [[1, 2, 3], [4, 1, 2]]


def test_cells_that_do_not_fit_are_refused_in_words():
    wide = WideConfig.for_model(TINY, ffn_group_size=16)
    assert "63 + 2 tokens are beyond max_position_embeddings=64" in refusal(
        TINY, wide, 1, 63, BENCH
    )
    assert refusal(TINY, wide, 1, 16, BENCH) is None
    # `generate` makes twice as many tokens, and is refused by itself.
    phases, twice = bench_e2e.parts(dataclasses.replace(BENCH, generate=True))
    assert (phases, twice.phases) == (BENCH, ())
    assert refusal(TINY, wide, 1, 60, twice) is None
    assert refusal(TINY, wide, 1, 61, phases) is None
    assert "61 + 4 tokens are beyond" in refusal(TINY, wide, 1, 61, twice)
    assert bench_e2e.parts(BENCH) == [BENCH]


def test_a_cell_is_refused_when_its_memory_is_more_than_jax_has(monkeypatch):
    """Decode steps alone need no prompt's activations: 4 sequences of 65,536 tokens fit then."""
    large = shape("llama-3.1-8b")
    wide = WideConfig.for_model(large, ffn_group_size=128)
    both, steps = E2EConfig(), E2EConfig(phases=("decode",))
    monkeypatch.setattr(bench_e2e, "memory_limit", lambda: 60 * 2**30)
    found = refusal(large, wide, 4, 65_536, both)
    assert re.fullmatch(r"needs about \d+ GiB, JAX has 60 of .*MEM_FRACTION.*", found)
    assert refusal(large, wide, 4, 65_536, steps) is None
    assert refusal(large, wide, 4, 65_536, steps, own=True) == found  # they see a prompt first
    assert refusal(large, wide, 4, 16_384, both) is None
    asked = dataclasses.replace(both, phases=(), generate=True)
    assert refusal(large, wide, 4, 65_536, asked) is not None
    # `generate` pads prompts to a power of two.
    needs = [refusal(large, wide, 4, tokens, asked) for tokens in (40_000, 65_536)]
    assert needs[0] == needs[1]
    pieces = dataclasses.replace(asked, prefill_chunk=4_096)
    assert refusal(large, wide, 4, 65_536, pieces) is None
    monkeypatch.setattr(bench_e2e, "memory_limit", lambda: None)
    assert refusal(large, wide, 16, 65_536, both) is None


def test_masks_are_needed_of_the_largest_cell_that_fits():
    bench = dataclasses.replace(BENCH, tokens=(16, 32, 4_096), batches=(1, 3))
    assert tokens_needed(TINY, bench) == 3 * 32 + 2


def test_the_command_times_a_shape_with_a_models_masks(tmp_path, monkeypatch, capsys, tokenizer):
    """All of it but the device: the folder is read, its masks are taken and carried, and timed."""
    model = tiny_model(num_hidden_layers=1)
    save_model(tmp_path / "dense", model.config, tensors_of(model))
    tokenizer.save_pretrained(tmp_path / "dense")
    wide = WideConfig.for_model(model.config, ffn_group_size=8, router_rank=4)
    save_wide_model(
        tmp_path / "wide",
        base=tmp_path / "dense",
        config=model.config,
        wide=wide,
        routers=new_routers(model.config, wide),
        budget="separate",
        targets={"attention": 0.5, "ffn": 0.5},
        training={},
        include_base=False,
    )
    (tmp_path / "text.txt").write_text("the old cat sat on a hat. " * 3)
    monkeypatch.setattr(bench_e2e_command, "start", lambda platform, console: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench_e2e, "dense_variants", lambda: DENSE[:1])
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    options = ["--shape", "tiny", "--masks-of", str(tmp_path / "wide"), "--sparsities"]
    options += ["--tokens", "32", "--batches", "1", "--ffn-groups", "8", "--phases", "decode"]
    options += ["--steps", "2", "--rounds", "1", "--json", str(tmp_path / "e2e.jsonl")]
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        assert main(["bench", "e2e", *options, "--text", str(tmp_path / "text.txt")]) == 0
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    printed = capsys.readouterr().out
    assert "4 ffn groups for 8 (each 2x)" in printed.replace("\n", " ")
    assert "repeated" not in printed  # 78 tokens are enough for 34
    found = [record for _, record in records.read_records(tmp_path / "e2e.jsonl")]
    kinds = ["none", "trained_statistics", "random_same_rates"]
    assert [(r["phase"], r["mask"]) for r in found] == [("decode", kind) for kind in kinds]
    assert {r["model"] for r in found} == {"tiny-shape"}
    assert found[1]["masks_of"]["text_tokens"] == 78
    assert found[1]["masks_of"]["fingerprint"].startswith("sha256:")


@pytest.mark.parametrize("option", ["--model", "--masks-of"])
def test_a_folder_without_routers_is_refused(option, tmp_path, monkeypatch, capsys, tokenizer):
    model = tiny_model(num_hidden_layers=1)
    save_model(tmp_path / "dense", model.config, tensors_of(model))
    tokenizer.save_pretrained(tmp_path / "dense")
    monkeypatch.setattr(bench_e2e_command, "start", lambda platform, console: None)
    assert main(["bench", "e2e", option, str(tmp_path / "dense")]) == 1
    assert "has no routers: give a WIDE model" in capsys.readouterr().err


def test_groups_that_do_not_divide_the_ffn_are_refused_before_a_model_is_read(monkeypatch, capsys):
    monkeypatch.setattr(bench_e2e_command, "start", lambda platform, console: None)
    assert main(["bench", "e2e", "--masks-of", "no-such-folder", "--ffn-groups", "100"]) == 1
    assert "ffn_group_size=100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sparsities", "0.5", "50"), "sparsities=(0.5, 50.0) must all be in [0, 1]"),
        (("--steps", "0"), "steps=0 must be at least 1"),
        (("--tokens", "0"), "tokens=(0,) must all be at least 1"),
        (("--prefill-chunk", "8"), "give --generate too"),
        (("--generate", "--prefill-chunk", "0"), "prefill_chunk=0 must be at least 1"),
        (("--model", "any", "--layers", "2"), "--layers cuts a --shape"),
        (("--model", "any", "--masks-of", "other"), "give one of them"),
        (("--text", "any.txt"), "give --model or --masks-of too"),
        (("--masks-of", "any", "--text", "gone.txt"), "gone.txt"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(options, message, capsys):
    assert main(["bench", "e2e", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folders", "part"),
    [
        (("norm_route", "layout"), "routing"),
        (("route_kv",), "routing, k and v"),
        (("attention_prefill", "attention_decode"), "attention"),
        (("rms_norm",), "norm"),
        (("rope_cache",), "rotation"),
        (("project_qkv", "gemm_k", "_common"), "products"),
    ],
)
def test_a_profile_knows_the_part_of_every_kernel(folders, part):
    root = Path(pallas_kernels.__file__).parent
    for folder in folders:
        files = (root / folder).glob("*.py")
        names = re.findall(r"^def (\w+_kernel)\(", "".join(f.read_text() for f in files), re.M)
        names = [name for name in names if name != "run_kernel"]  # it launches one
        assert names
        assert {name: part_of(name) for name in names} == dict.fromkeys(names, part)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU to measure on")
def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        measure(TINY, "tiny", BENCH, Console(file=io.StringIO()))
