"""The harness's own Hugging Face wrapper on a task: every request's ids and log-likelihood.

Runs in the environment of torch (`eval/parity/run.sh` makes it) and imports nothing of the project:
`python eval/parity/reference.py --model DIR --task arc_easy --data FILE --limit 250 --out FILE`.
"""

import argparse
import json
from pathlib import Path

import lm_eval
import torch  # pyrefly: ignore[missing-import]  # runs in make parity's own environment
import transformers
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM


class Recorder(HFLM):
    """The wrapper, keeping what it was asked and what it answered."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests = []

    def _loglikelihood_tokens(self, requests, *args, **kwargs):
        answers = super()._loglikelihood_tokens(requests, *args, **kwargs)
        for (texts, context, continuation), (value, greedy) in zip(requests, answers, strict=True):
            self.requests.append(
                {
                    "texts": list(texts),
                    "context_ids": list(context),
                    "continuation_ids": list(continuation),
                    "loglikelihood": float(value),
                    "greedy": bool(greedy),
                }
            )
        return answers


def local_task(task: str, data: Path) -> dict:
    """The harness's task with a local test file, inside a group (only there it is merged)."""
    override = {
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": None,
    }
    return {"group": f"{task}_local", "task": [override]}


def main() -> None:
    """Run the wrapper and write what it did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="arc_easy")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lm = Recorder(pretrained=args.model, dtype="float32", batch_size=args.batch_size, device="cpu")
    found = simple_evaluate(
        lm, tasks=[local_task(args.task, args.data)], limit=args.limit, bootstrap_iters=0
    )
    metrics = {
        key.removesuffix(",none"): value
        for key, value in found["results"][args.task].items()
        if key.endswith(",none") and isinstance(value, float) and "stderr" not in key
    }
    packages = (lm_eval, torch, transformers)
    result = {
        "task": args.task,
        "limit": args.limit,
        "metrics": metrics,
        "requests": lm.requests,
        "versions": {package.__name__: package.__version__ for package in packages},
    }
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
