"""The comparison with the harness's wrapper finds what it is there to find."""

import copy
import gzip
import json

import pytest

from tests.eval.conftest import tiny_model

pytest.importorskip("lm_eval", reason="the harness is an extra: pip install '.[eval]'")

from eval.harness import HarnessConfig, WideLM
from eval.parity.compare import BOUND, compare
from eval.tasks import TasksConfig, run_tasks


@pytest.fixture(scope="module")
def lm(tokenizer):
    model = tiny_model(num_hidden_layers=1)
    return WideLM(model, tokenizer, config=HarnessConfig(progress=False, max_length=96))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "tasks").mkdir()

    rows = [
        {
            "id": str(i),
            "question": "abc " * (i + 1),
            "choices": {"text": ["a b", "c"], "label": ["A", "B"]},
            "answerKey": "AB"[i % 2],
        }
        for i in range(3)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "tasks" / "arc_easy_test.jsonl.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.fixture(scope="module")
def reference(lm, data_dir, tmp_path_factory):
    """What `reference.py` would have written, had the wrapper this model."""
    asked = []
    original = lm._loglikelihood_tokens

    def keep(requests, **kwargs):
        answers = original(requests, **kwargs)
        for (texts, context, continuation), (value, greedy) in zip(requests, answers, strict=True):
            asked.append(
                {
                    "texts": list(texts),
                    "context_ids": context,
                    "continuation_ids": continuation,
                    "loglikelihood": value,
                    "greedy": greedy,
                }
            )
        return answers

    lm._loglikelihood_tokens = keep
    [result] = run_tasks(lm, TasksConfig(("arc_easy",), data_dir=data_dir, limit=3))
    del lm._loglikelihood_tokens
    return {
        "task": "arc_easy",
        "limit": 3,
        "metrics": dict(result.metrics),
        "requests": asked,
    }


def test_equal_answers_pass(lm, data_dir, reference):
    found = compare(lm, reference, data_dir)
    assert found.passed
    assert (found.n, found.documents, found.max_difference) == (6, 3, 0.0)
    assert "token ids equal" in found.line()


@pytest.mark.parametrize("fault", ["ids", "loglikelihood", "greedy", "metric", "no metrics"])
def test_every_difference_fails(lm, data_dir, reference, fault):
    changed = copy.deepcopy(reference)
    first = changed["requests"][0]
    if fault == "ids":
        first["continuation_ids"] = [*first["continuation_ids"], 3]
    elif fault == "loglikelihood":
        first["loglikelihood"] += 2 * BOUND
    elif fault == "greedy":
        first["greedy"] = not first["greedy"]
    elif fault == "metric":
        changed["metrics"]["acc"] += 0.5
    else:
        changed["metrics"] = {}
    assert not compare(lm, changed, data_dir).passed


def test_an_empty_reference_is_refused(lm, data_dir, reference):
    with pytest.raises(ValueError, match="holds no requests"):
        compare(lm, reference | {"requests": []}, data_dir)
