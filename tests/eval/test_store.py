"""Answers on disk: a run goes on where it stopped, with the account of every token."""

import json

import numpy as np
import pytest

from eval.scoring import Ran
from eval.store import Answered, RequestStore, request_key
from wide_jax.accounting import Usage


def ran(tokens):
    sums = [np.full(2, float(tokens + i)) for i in range(5)]
    return Ran(tokens, 3 * tokens, Usage(np.float64(tokens), *sums, attn_groups=2, ffn_groups=4))


def test_answers_and_sums_come_back(tmp_path):
    path = tmp_path / "deep" / "requests.jsonl"
    store = RequestStore(path, {"model": "m", "limit": None})
    store.add(Answered({"a": [-1.5, True]}, ran(4)))
    store.add(Answered({"b": "text\n", "c": ""}, ran(5), ran(2)))
    again = RequestStore(path, {"model": "m", "limit": None})
    assert again.answers() == {"a": [-1.5, True], "b": "text\n", "c": ""}
    prefill, decode = again.ran()
    assert (prefill.tokens, prefill.keys, decode.tokens) == (9, 27, 2)
    assert prefill.usage.ffn.tolist() == (ran(4) + ran(5)).usage.ffn.tolist()
    assert prefill.usage.ffn.dtype == np.float64
    assert decode.usage.kv_keys.tolist() == ran(2).usage.kv_keys.tolist()


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "requests.jsonl"
    store = RequestStore(path, {})
    store.add(Answered({"a": 1}, Ran(1, 1)))
    with path.open("a") as stream:
        stream.write('{"answers": {"b": 2}, "pre')
    again = RequestStore(path, {})
    assert again.answers() == {"a": 1}
    again.add(Answered({"c": 3}, Ran(1, 1)))
    assert RequestStore(path, {}).answers() == {"a": 1, "c": 3}


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "requests.jsonl"
    RequestStore(path, {"model": "m", "limit": 5, "seed": 1})
    with pytest.raises(ValueError, match=r"other settings \(limit, model differ\)"):
        RequestStore(path, {"model": "n", "limit": None, "seed": 1})


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"settings": {}}) + "\noops\n")
    with pytest.raises(ValueError, match=r"requests\.jsonl:2: not JSON"):
        RequestStore(path, {})


def test_keys_tell_requests_apart():
    keys = {
        request_key("loglikelihood", [1, 2], [3]),
        request_key("loglikelihood", [1], [2, 3]),
        request_key("loglikelihood_rolling", [1, 2], [3]),
        request_key("loglikelihood", [1, 2], [4]),
    }
    assert len(keys) == 4
