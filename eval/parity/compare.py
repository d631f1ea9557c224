"""Our answers to the requests that `reference.py` wrote down: ids, log-likelihoods, accuracy.

`python -m eval.parity.compare --reference FILE --data-dir DIR [--record FILE]` exits with 1 unless
all token ids are equal, log-likelihoods differ by at most 1e-3 (float32) and metrics are equal.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from eval.harness import HarnessConfig, WideLM
from eval.records import append_record, commit, common_fields
from eval.tasks import TasksConfig, run_tasks

BOUND = 1e-3  # nats, on each request's log-likelihood, in float32


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two runs of the same task differ."""

    task: str
    n: int  # requests
    documents: int
    token_ids_equal: bool
    greedy_equal: bool
    max_difference: float  # of a log-likelihood, nats
    accuracy: Mapping[str, Mapping[str, float]]  # metric -> {"ours", "reference"}

    @property
    def passed(self) -> bool:
        """Everything that must be equal is, and the rest is within its bound."""
        same = all(pair["ours"] == pair["reference"] for pair in self.accuracy.values())
        equal = self.token_ids_equal and self.greedy_equal and same and bool(self.accuracy)
        return equal and self.max_difference <= BOUND

    def line(self) -> str:
        """One line for people."""
        metrics = ", ".join(
            f"{name} {pair['ours']:.4f} / {pair['reference']:.4f}"
            for name, pair in self.accuracy.items()
        )
        return (
            f"{self.task}: {self.n} requests of {self.documents} documents, token ids "
            f"{'equal' if self.token_ids_equal else 'DIFFER'}, greedy flags "
            f"{'equal' if self.greedy_equal else 'DIFFER'}, log-likelihoods within "
            f"{self.max_difference:.2e}; ours / reference: {metrics}"
        )


def compare(lm: WideLM, reference: Mapping[str, Any], data_dir: Path) -> Comparison:
    """Run the reference's task and requests on our side.

    Raises:
        ValueError: a reference without requests.
    """
    if not reference["requests"]:
        raise ValueError("the reference holds no requests")
    config = TasksConfig((reference["task"],), data_dir=data_dir, limit=reference["limit"])
    [result] = run_tasks(lm, config)
    asked = reference["requests"]
    pairs = [tuple(request["texts"]) for request in asked]
    ids_equal = all(
        (request["context_ids"], request["continuation_ids"]) == _ids(lm, *pair)
        for request, pair in zip(asked, pairs, strict=True)
    )
    instances = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs
    ]
    answers = lm.loglikelihood(instances, disable_tqdm=True)  # all of them known from the task
    return Comparison(
        task=reference["task"],
        n=len(asked),
        documents=result.n,
        token_ids_equal=ids_equal,
        greedy_equal=all(
            greedy == request["greedy"] for (_, greedy), request in zip(answers, asked, strict=True)
        ),
        max_difference=max(
            abs(value - request["loglikelihood"])
            for (value, _), request in zip(answers, asked, strict=True)
        ),
        accuracy={
            name: {"ours": result.metrics[name], "reference": value}
            for name, value in reference["metrics"].items()
        },
    )


def _ids(lm: WideLM, context: str, continuation: str) -> tuple[list[int], list[int]]:
    if context == "":
        return [lm.prefix_token_id], lm.tok_encode(continuation, add_special_tokens=False)
    before, after = lm._encode_pair(context, continuation)
    return list(before), list(after)


def main(argv: list[str] | None = None) -> int:
    """Compare, print, record; 1 if anything is off."""
    from eval.check_values import load_embedded

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args(argv)
    commit()
    reference = json.loads(args.reference.read_text(encoding="utf-8"))
    model, tokenizer, name = load_embedded()
    config = HarnessConfig(batch_size=args.batch_size, progress=sys.stderr.isatty())
    found = compare(WideLM(model, tokenizer, config=config, name=name), reference, args.data_dir)
    print(found.line())
    if args.record is not None:
        record = common_fields("parity") | {"model": name, **dataclasses.asdict(found)}
        append_record(args.record, record | {"reference_versions": reference["versions"]})
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
