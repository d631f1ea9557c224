"""Result records: complete, finite, one a line."""

import json
import re

import pytest

from eval.records import (
    FIELDS,
    append_record,
    command_line,
    eval_record,
    read_records,
    versions,
)

SIX = dict.fromkeys(("attention", "ffn", "paper", "parameters", "flops", "bytes"), 0.25)


def record(**changes):
    settings = {
        "model": "tiny",
        "task": "wikitext2_raw",
        "metric": "token_perplexity",
        "value": 12.5,
        "stderr": None,
        "n": 100,
        "accounting": SIX | {"tokens": 7},
        "recipe": {"method": "wide"},
    }
    return eval_record(**(settings | changes))


def test_a_record_has_the_common_fields_and_comes_back(tmp_path):
    path = tmp_path / "deep" / "eval.jsonl"
    first, second = record(), record(value=11.0, seed=3, updates=250)
    append_record(path, first)
    append_record(path, second)
    assert list(read_records(path)) == [(1, first), (2, second)]
    assert first["suite"] == "eval"
    assert first["accounting"] == SIX
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", first["time"])
    assert first["device"] == "cpu"
    assert set(first["versions"]) == {"python", "jax", "jaxlib", "triton", "jax_triton", "flax"}
    assert versions()["jax"] is not None
    assert "/" not in command_line().split()[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_failed_run_is_not_recorded(tmp_path, value):
    with pytest.raises(ValueError, match="not finite: value"):
        append_record(tmp_path / "eval.jsonl", record(value=value))
    with pytest.raises(ValueError, match="not finite: accounting"):
        append_record(tmp_path / "eval.jsonl", record(accounting=SIX | {"flops": value}))
    assert not (tmp_path / "eval.jsonl").exists()


@pytest.mark.parametrize("suite", FIELDS)
def test_missing_fields_are_all_named(tmp_path, suite):
    with pytest.raises(ValueError, match=f"suite '{suite}' lacks .*{FIELDS[suite][-1]}"):
        append_record(tmp_path / "x.jsonl", {"suite": suite})


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps(record()) + "\n{oops\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"eval\.jsonl:2: not JSON"):
        list(read_records(path))
    path.write_text('\n{"suite": "guess"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"eval\.jsonl:2: suite 'guess' is none of"):
        list(read_records(path))
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"eval\.jsonl:1: expected an object, found list"):
        list(read_records(path))
