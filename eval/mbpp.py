"""MBPP+ (EvalPlus, arXiv 2305.01210): does a generated function pass its tests, in the sandbox?

The prompt, few-shot examples and base tests are the harness's own `mbpp_plus`; only its checker,
which needs a download and runs code unconfined, is replaced. Where a problem brings the `inputs`
and `results` of EvalPlus, `plus_pass_at_1` also asks for those.
"""

import ast
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from eval.sandbox import Limits, Verdict, run

# A problem has about a hundred plus inputs, some of them slow by intent.
PLUS_LIMITS = Limits(seconds=60.0)

# EvalPlus' comparison: exact, or close for floats; `set_eq` ignores order, `not_none` asks whether
# there was an answer at all.
_CHECK = """
def _close(out, exp, atol):
    if isinstance(exp, float) or isinstance(out, float):
        return isinstance(out, (int, float)) and abs(out - exp) <= atol + 1e-7 * abs(exp)
    if isinstance(exp, (list, tuple)):
        return type(out) is type(exp) and len(out) == len(exp) and all(
            _close(o, e, atol) for o, e in zip(out, exp))
    return out == exp

def _floats(x):
    if isinstance(x, (list, tuple)):
        return bool(x) and all(map(_floats, x))
    return isinstance(x, float)

def _same(out, exp, oracle, atol):
    if oracle == "set_eq":
        out, exp = set(out), set(exp)
    if oracle == "not_none" and not isinstance(out, bool):
        return exp == (out is not None)
    if out == exp:
        return True
    atol = 1e-6 if atol == 0 and _floats(exp) else atol
    return atol != 0 and _close(out, exp, atol)
"""


def base_program(code: str, doc: Mapping[str, Any]) -> str:
    """The code with the problem's own asserts, as the harness checks it."""
    return "\n".join([code, *doc.get("test_imports", []), *doc["test_list"]])


def plus_program(code: str, doc: Mapping[str, Any]) -> str:
    """The code with EvalPlus' inputs and results.

    Raises:
        ValueError: inputs and results that are no Python literals or differ in number.
    """
    inputs, results = (ast.literal_eval(doc[name]) for name in ("inputs", "results"))
    if len(inputs) != len(results):
        raise ValueError(
            f"task {doc.get('task_id')}: {len(inputs)} inputs for {len(results)} results"
        )
    loop = (
        f"for _args, _exp in zip({inputs!r}, {results!r}, strict=True):\n"
        f"    _out = {doc['entry_point']}(*_args)\n"
        f"    assert _same(_out, _exp, {doc['oracle']!r}, {doc['atol']!r}), (_args, _out, _exp)\n"
    )
    return "\n".join([code, _CHECK, loop])


def check(code: str, doc: Mapping[str, Any]) -> dict[str, float]:
    """1.0 or 0.0 for the base tests and, where there are any, for base and plus tests together."""
    base = run(base_program(code, doc)).outcome == "passed"
    scores = {"pass_at_1": float(base)}
    if "inputs" in doc:
        plus = base and run(plus_program(code, doc), PLUS_LIMITS).outcome == "passed"
        scores["plus_pass_at_1"] = float(plus)
    return scores


def process_results(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """The harness's hook: metrics of one problem from its (filtered) continuation."""
    code = results[0]
    return check(code[0] if isinstance(code, list) else code, doc)


class CodeEval:
    """What the harness's task file uses of `evaluate.load("code_eval")`, in the sandbox."""

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], dict[int, list[Verdict]]]:
        """Mean over problems of "the first candidate passes"; other k are refused."""
        if list(k) != [1]:
            raise NotImplementedError(f"only pass@1 is computed, asked for {k=}")
        verdicts = {
            number: [run(f"{code}\n{test}") for code in codes]
            for number, (test, codes) in enumerate(zip(references, predictions, strict=True))
        }
        passed = [found[0].outcome == "passed" for found in verdicts.values()]
        return {"pass@1": sum(passed) / len(passed)}, verdicts


@contextmanager
def sandboxed_code_eval() -> Generator[None]:
    """While tasks are loaded: `evaluate.load("code_eval")` gives the sandbox, not a download."""
    import evaluate

    original = evaluate.load

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        return CodeEval() if path == "code_eval" else original(path, *args, **kwargs)

    evaluate.load = load
    try:
        yield
    finally:
        evaluate.load = original
