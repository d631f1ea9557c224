"""The task path, offline, from local files to results: tiny data, the harness's own definitions."""

import copy
import dataclasses
import gzip
import json
import math
import random

import jaxtyping
import pytest

from tests.eval.conftest import TINY, tiny_model
from wide_jax.config import WideConfig

pytest.importorskip("lm_eval", reason="the harness is an extra: pip install '.[eval]'")

from eval.harness import HarnessConfig, WideLM
from eval.records import read_records
from eval.speed import SpeedMeter, SpeedShape
from eval.tasks import TasksConfig, check_tasks, result_records, run_tasks, task_spec

WORDS = ["the", "a", "cat", "dog", "sun", "red", "sea", "old", "new", "big", "top", "hat"]


def sentence(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A data folder with a few documents of every kind of task."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("data")
    choices = [{"text": [sentence(rng, n) for n in (1, 2, 3, 2)], "label": list("ABCD")}] * 6
    files = {
        "tasks/arc_easy_test.jsonl.gz": [
            {
                "id": str(i),
                "question": sentence(rng, 5 + i),
                "choices": c,
                "answerKey": "ABCD"[i % 4],
            }
            for i, c in enumerate(choices)
        ],
        "wikitext2/wikitext2_raw_test.jsonl.gz": [
            {"page": f" = {sentence(rng, 1)} = \n \n {sentence(rng, 90)} \n"},
            {"page": sentence(rng, 3)},
        ],
        "tasks/gsm8k_train500.jsonl.gz": [
            {"question": sentence(rng, 3), "answer": f"so {i}\n#### {i}"} for i in range(6)
        ],
        "tasks/gsm8k_test.jsonl.gz": [
            {"question": sentence(rng, 3), "answer": f"#### {i}"} for i in range(2)
        ],
        "tasks/mmlu_dev.jsonl": [
            {"question": sentence(rng, 2), "subject": s, "choices": list("wxyz"), "answer": i % 4}
            for s in ("anatomy", "virology")
            for i in range(5)
        ],
        "tasks/mmlu_test.jsonl.gz": [
            {"question": sentence(rng, 3), "subject": s, "choices": list("wxyz"), "answer": 1}
            for s in ("virology", "anatomy", "anatomy")
        ],
        "tasks/mbppplus_test.jsonl.gz": [
            {
                "task_id": 7,
                "prompt": "square a number.",
                "code": "",
                "test_imports": [],
                "test_list": ["assert f(2) == 4", "assert f(3) == 9", "assert f(0) == 0"],
                "entry_point": "f",
                "oracle": "eq",
                "atol": 0,
                "inputs": "[[2]]",
                "results": "[4]",
            }
        ],
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return folder


@pytest.fixture(scope="module")
def model():
    wide = WideConfig.for_model(TINY, ffn_group_size=8, router_rank=4)
    return tiny_model(wide, max_position_embeddings=1024, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def _own_cache_and_few_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.scoring.SHORTEST_BUCKET", 512)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def lm_of(model, tokenizer, **settings):
    settings = {"progress": False, "batch_size": 8} | settings
    return WideLM(model, tokenizer, config=HarnessConfig(**settings), name="tiny")


def test_a_task_offline_through_the_whole_path(model, tokenizer, data_dir, tmp_path):
    config, seen = TasksConfig(("arc_easy",), data_dir=data_dir, samples=True), []
    [result] = run_tasks(
        lm_of(model, tokenizer),
        config,
        on_result=seen.append,
        out=tmp_path,
        fingerprint="sha256:abc",
        recipe={"method": "wide", "seed": 3},
    )
    assert seen == [result]
    assert (result.task, result.n, result.decode) == ("arc_easy", 6, None)
    assert set(result.metrics) == {"acc", "acc_norm"}
    assert all(value in [i / 6 for i in range(7)] for value in result.metrics.values())
    assert all(error > 0 for error in result.stderr.values())
    assert 0 < result.prefill.flops < 1
    assert len(result.prefill.ffn_layers) == 1
    lines = (tmp_path / "samples-arc_easy.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 6
    right = sum(sample["acc"] for sample in samples)
    assert right / 6 == result.metrics["acc"]
    # Every real token was counted once: the requests as the samples show them.
    rows = {
        tuple(tokenizer.encode(context + continuation))[:-1]
        for sample in samples
        for context, continuation in sample["arguments"]
    }
    assert result.prefill.tokens == sum(map(len, rows))
    records = [record for _, record in read_records(tmp_path / "eval.jsonl")]
    assert {r["metric"]: r["value"] for r in records} == dict(result.metrics)
    assert records[0]["accounting"] == result.prefill.summary()
    assert (records[0]["model"], records[0]["seed"]) == ("sha256:abc", 3)
    expected = {"model": "sha256:abc", "task": "arc_easy", "limit": None, "chat": False}
    assert expected.items() <= records[0]["settings"].items()
    report = json.loads((tmp_path / "tasks.json").read_text())
    assert report["results"] == json.loads(json.dumps([result.to_json()]))
    assert report["harness"]["lm_eval"]
    assert str(data_dir) not in (tmp_path / "eval.jsonl").read_text()


def test_on_a_gpu_every_task_says_how_fast_its_own_tokens_run(
    model, tokenizer, data_dir, tmp_path, monkeypatch
):
    timed, meters = [], []

    class ShortMeter(SpeedMeter):
        def __init__(self, model, *, routing):
            super().__init__(model, routing=routing, shape=SpeedShape(32, 2, 1))
            meters.append(self)

        def measure(self, ids):
            timed.append(list(ids))
            return super().measure(ids)

    monkeypatch.setattr("eval.tasks.SpeedMeter", ShortMeter)
    monkeypatch.setattr("eval.tasks.worth_timing", lambda routing: True)
    # Compiling ahead puts descriptions of arrays where run-time checks expect arrays.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        tasks = TasksConfig(("wikitext", "mbpp_plus"), data_dir=data_dir)
        found = run_tasks(lm_of(model, tokenizer), tasks, out=tmp_path)
        untimed = dataclasses.replace(tasks, timing=False)
        again = run_tasks(lm_of(model, tokenizer), untimed, out=tmp_path)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert len(meters) == 1  # and so one compile for both tasks
    assert all(r.speedup is not None for r in found)
    assert all(r.speedup is None for r in again)
    with gzip.open(data_dir / "wikitext2/wikitext2_raw_test.jsonl.gz", "rt") as stream:
        words = json.loads(next(stream))["page"].split()
    # After the token that a page starts with; the harness changes white space only.
    assert tokenizer.decode(timed[0][1:]).split()[:40] == words[:40]
    assert "square a number" in tokenizer.decode(timed[1])  # answers read from files are asked too
    speedup = json.loads((tmp_path / "tasks.json").read_text())["results"][0]["speedup"]
    assert speedup is None  # of the last run
    records = [record for _, record in read_records(tmp_path / "eval.jsonl")]
    assert len(records) == sum(len(r.metrics) for r in found)  # nothing new the second time
    assert records[0]["speedup"] == json.loads(json.dumps(found[0].speedup.to_json()))
    assert 0 < records[0]["speedup"]["prefill"]["skipped"]["ffn"] < 1


def test_nothing_depends_on_batch_size_and_a_cut_run_goes_on(
    model, tokenizer, data_dir, tmp_path, monkeypatch
):
    config = TasksConfig(("arc_easy",), data_dir=data_dir)
    [whole] = run_tasks(lm_of(model, tokenizer, batch_size=4), config)
    lm = lm_of(model, tokenizer, batch_size=4)
    answer, calls = lm._score, []

    def cut_short(windows, kind, *, share):
        calls.append(len(windows))
        answer(windows[:9], kind, share=share)
        raise KeyboardInterrupt

    monkeypatch.setattr(lm, "_score", cut_short)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(lm, config, out=tmp_path)
    assert calls == [24]
    monkeypatch.undo()
    [resumed] = run_tasks(lm_of(model, tokenizer, batch_size=8), config, out=tmp_path)
    assert resumed == whole  # metrics, errors, and the account of every token
    lines = (tmp_path / "requests-arc_easy.jsonl").read_text().splitlines()
    assert sum(len(json.loads(line)["answers"]) for line in lines[1:]) == 24
    with pytest.raises(ValueError, match=r"other settings \(limit differ\)"):
        run_tasks(
            lm_of(model, tokenizer),
            TasksConfig(("arc_easy",), data_dir=data_dir, limit=2),
            out=tmp_path,
        )


def test_every_kind_of_request(model, tokenizer, data_dir):
    lm = lm_of(model, tokenizer, max_length=700)
    config = TasksConfig(("wikitext", "gsm8k", "mmlu", "mbpp_plus"), data_dir=data_dir)
    found = {result.task: result for result in run_tasks(lm, config)}
    assert set(found["wikitext"].metrics) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert set(found["gsm8k"].metrics) == {
        "exact_match,strict-match",
        "exact_match,flexible-extract",
    }
    assert found["gsm8k"].num_fewshot == 5
    assert found["gsm8k"].decode.tokens > 0
    [record, _] = result_records(lm, found["gsm8k"], fingerprint=None, recipe={"method": "wide"})
    assert len(record["layers_decode"]["ffn"]) == 1
    assert record["layers_decode"]["ffn"] != record["layers"]["ffn"]
    assert (found["mmlu"].n, found["mmlu"].num_fewshot) == (3, 5)
    assert set(found["mmlu"].metrics) == {"acc"}
    assert found["mbpp_plus"].metrics == {"pass_at_1": 0.0, "plus_pass_at_1": 0.0}
    for result in found.values():
        assert result.n > 0
        assert 0 < result.prefill.flops < 1
        assert result.task in result.line()


def test_case_D6_word_perplexity_of_a_page(model, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "wikitext2").mkdir()
    line = json.dumps({"page": " = T = \n \n a b c \n"}) + "\n"
    path = tmp_path / "wikitext2" / "wikitext2_raw_test.jsonl.gz"
    path.write_bytes(gzip.compress(line.encode()))
    lm = lm_of(model, tokenizer)
    monkeypatch.setattr(lm, "loglikelihood_rolling", lambda requests: [-12.0] * len(requests))
    [result] = run_tasks(lm, TasksConfig(("wikitext",), data_dir=tmp_path))
    assert result.metrics["word_perplexity"] == pytest.approx(4.4817, abs=1e-4)
    assert result.metrics["byte_perplexity"] == pytest.approx(math.exp(12 / 18))


def test_case_D6_choices_are_normalised_by_characters_or_bytes(
    model, tokenizer, tmp_path, monkeypatch
):
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps({"gold": 1}) + "\n", encoding="utf-8")
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "q",
        "doc_to_target": "gold",
        "doc_to_choice": ["éééé", "abcde"],
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
    }
    monkeypatch.setattr("eval.tasks.task_spec", lambda name, data_dir: task)
    lm = lm_of(model, tokenizer)
    monkeypatch.setattr(lm, "loglikelihood", lambda requests: [(-8.0, False), (-7.5, False)])
    [result] = run_tasks(lm, TasksConfig(("choices",), data_dir=tmp_path))
    # B is right: acc and acc_norm (-2.0 and -1.5) pick it, acc_bytes (-1.0 and -1.5) picks A.
    assert result.metrics == {"acc": 1.0, "acc_norm": 1.0, "acc_bytes": 0.0}


def test_chat_template_and_system_prompt(model, tokenizer, data_dir):
    config = TasksConfig(
        ("arc_easy",), data_dir=data_dir, limit=1, chat=True, system="be right", samples=True
    )
    [plain] = run_tasks(
        lm_of(model, tokenizer), TasksConfig(("arc_easy",), data_dir=data_dir, limit=1)
    )
    [chat] = run_tasks(lm_of(model, tokenizer), config)
    assert chat.prefill.tokens > plain.prefill.tokens


def test_missing_data_and_unknown_tasks_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"task piqa: no .*piqa_validation\.jsonl\.gz"):
        task_spec("piqa", tmp_path)
    with pytest.raises(FileNotFoundError, match="task mmlu: no tasks/mmlu_test"):
        task_spec("mmlu", tmp_path)
    with pytest.raises(ValueError, match="task 'lambada' has no local data; with a data folder: w"):
        task_spec("lambada", tmp_path)
    assert task_spec("lambada", None) == "lambada"
    with pytest.raises(ValueError, match="no tasks given"):
        TasksConfig(())
    with pytest.raises(ValueError, match="limit=0"):
        TasksConfig(("piqa",), limit=0)
    with pytest.raises(ValueError, match="ask for chat too"):
        TasksConfig(("piqa",), system="be right")


def test_what_a_later_task_lacks_stops_the_run_before_the_first(
    model, tokenizer, data_dir, tmp_path
):
    lm = lm_of(model, tokenizer)
    config = TasksConfig(("arc_easy", "piqa"), data_dir=data_dir)
    with pytest.raises(FileNotFoundError, match="task piqa"):
        run_tasks(lm, config, out=tmp_path)
    run_tasks(lm, TasksConfig(("wikitext",), data_dir=data_dir, limit=1), out=tmp_path)
    with pytest.raises(ValueError, match=r"requests-wikitext\.jsonl.*\(limit differ\)"):
        run_tasks(lm, TasksConfig(("arc_easy", "wikitext"), data_dir=data_dir), out=tmp_path)
    assert not (tmp_path / "samples-arc_easy.jsonl").exists()
    assert len((tmp_path / "requests-arc_easy.jsonl").read_text().splitlines()) == 1
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer of tiny has no chat template"):
        run_tasks(lm_of(model, plain), TasksConfig(("arc_easy",), data_dir=data_dir, chat=True))


def test_a_task_the_harness_does_not_know_is_named_with_similar_ones():
    with pytest.raises(ValueError, match=r"no task 'arc_esay'; similar: .*arc_easy"):
        check_tasks(TasksConfig(("piqa", "arc_esay")))
    with pytest.raises(ValueError, match="'ai2_arc' is the harness's tag"):
        check_tasks(TasksConfig(("ai2_arc",)))
    check_tasks(TasksConfig(("piqa",)))


def test_without_a_network_the_error_says_what_to_do(model, tokenizer, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'ybisk/piqa' on the Hub")

    monkeypatch.setattr("eval.tasks.simple_evaluate", unreachable)
    with pytest.raises(ConnectionError, match=r"task piqa: Couldn't reach.*--data-dir"):
        run_tasks(lm_of(model, tokenizer), TasksConfig(("piqa",)))
