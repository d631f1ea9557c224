"""MBPP+'s checker: base and plus tests, EvalPlus' comparisons, and nothing outside the sandbox."""

import pytest

from eval.mbpp import CodeEval, check, plus_program, process_results


def problem(**changes):
    doc = {
        "task_id": 1,
        "test_imports": ["import math"],
        "test_list": ["assert f(2) == 4", "assert math.isclose(f(3), 9)"],
        "entry_point": "f",
        "oracle": "eq",
        "atol": 0,
        "inputs": "[[2], [-1], [0]]",
        "results": "[4, 1, 0]",
    }
    return doc | changes


RIGHT = "def f(x):\n    return x * x"


@pytest.mark.parametrize(
    ("code", "base", "plus"),
    [
        (RIGHT, 1.0, 1.0),
        ("def f(x):\n    return x * x if x > 0 else None", 1.0, 0.0),  # only plus tests see it
        ("def f(x):\n    return 4", 0.0, 0.0),
        ("def g(x):\n    return x * x", 0.0, 0.0),
        ("import sys\nsys.exit(0)", 0.0, 0.0),
        ("import os\nos.system('true')\n" + RIGHT, 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_base_and_plus_tests(code, base, plus):
    assert check(code, problem()) == {"pass_at_1": base, "plus_pass_at_1": plus}
    assert process_results(problem(), [code])["pass_at_1"] == base


def test_without_plus_inputs_only_the_base_tests_count():
    doc = problem()
    del doc["inputs"]
    assert check(RIGHT, doc) == {"pass_at_1": 1.0}


@pytest.mark.parametrize(
    ("oracle", "atol", "returned", "expected", "same"),
    [
        ("eq", 0, "(1, 2)", "(1, 2)", True),
        ("eq", 0, "[1, 2]", "(1, 2)", False),
        ("eq", 0, "0.1 + 0.2", "0.3", True),  # floats are close, not equal
        ("eq", 0, "0.3001", "0.3", False),
        ("eq", 0.01, "0.3001", "0.3", True),
        ("eq", 0, "[0.1 + 0.2, 1.0]", "[0.3, 1.0]", True),
        ("eq", 0, "1", "True", True),
        ("set_eq", 0, "[2, 1]", "[1, 2]", True),
        ("set_eq", 0, "[2, 3]", "[1, 2]", False),
        ("not_none", 0, "'a match'", "True", True),
        ("not_none", 0, "None", "False", True),
        ("not_none", 0, "None", "True", False),
    ],
)
def test_comparisons_are_evalplus(oracle, atol, returned, expected, same):
    doc = problem(test_list=[], inputs="[[0]]", results=f"[{expected}]", oracle=oracle, atol=atol)
    found = check(f"def f(x):\n    return {returned}", doc)
    assert found == {"pass_at_1": 1.0, "plus_pass_at_1": float(same)}


def test_inputs_must_match_results():
    with pytest.raises(ValueError, match="task 1: 3 inputs for 1 results"):
        plus_program(RIGHT, problem(results="[4]"))


def test_the_harness_gets_a_sandboxed_code_eval():
    scores, verdicts = CodeEval().compute(
        references=["assert add(2, 3) == 5", "assert add(2, 3) == 5"],
        predictions=[["def add(a, b): return a * b"], ["def add(a, b): return a + b"]],
        k=[1],
    )
    assert scores == {"pass@1": 0.5}
    assert verdicts[0][0].detail == "AssertionError"
    with pytest.raises(NotImplementedError, match="only pass@1"):
        CodeEval().compute(references=[""], predictions=[[""]], k=[10])
