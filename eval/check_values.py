"""Known values of the embedded model: `python -m eval.check_values --data-dir ../shared/data`.

Measures what is known of SmolLM2-135M-Instruct (Q4_1 weights, dequantised, float32) and prints
value and expectation; with `--record` each measured value is added to the results. Exits with 1
if one is off.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from eval.perplexity import PerplexityConfig, PerplexityResult, evaluate_perplexity
from eval.records import append_record, commit, eval_record
from eval.text import TokenizedText, read_text, tokenize
from wide_jax.model import WideForCausalLM

WIKITEXT = "wikitext2/wikitext2_raw_test.jsonl.gz"
WIKITEXT_TOKENS = 303_415
# windows of it -> (PerplexityConfig, token perplexity)
PERPLEXITIES = {
    "first": (PerplexityConfig(window=1024, max_windows=12), 26.18),
    "full": (PerplexityConfig(window=2048), 21.77),
}
# task -> (metric, first so many documents, value through the harness)
TASK_VALUES = {
    "arc_easy": ("acc", 250, 0.50),
    "piqa": ("acc", 250, 0.636),
    "hellaswag": ("acc_norm", 150, 0.48),
    "openbookqa": ("acc_norm", 250, 0.344),
}


def load_embedded() -> tuple[WideForCausalLM, Any, str]:
    """The embedded model in float32, its tokenizer, and its name in reports."""
    from wide_jax.hf.embedded import EMBEDDED_MODEL
    from wide_jax.hf.pretrained import from_pretrained
    from wide_jax.hf.resolve import resolve_model
    from wide_jax.hf.tokenizer import load_tokenizer

    return from_pretrained(None), load_tokenizer(resolve_model(None)), EMBEDDED_MODEL.name


def wikitext(data_dir: Path, tokenizer: Any) -> TokenizedText:
    """WikiText-2 raw test as one run of ids."""
    return tokenize(
        read_text(data_dir / WIKITEXT),
        lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False),
        join=True,
    )


def perplexity_record(name: str, result: PerplexityResult) -> dict[str, object]:
    """The result as a record of the `eval` suite."""
    config = result.config
    return eval_record(
        model=name,
        task="wikitext2_raw",
        metric="token_perplexity",
        value=result.token_perplexity,
        stderr=result.token_perplexity_stderr,
        n=result.scored_tokens,
        accounting=result.accounting.summary(),
        recipe={
            "method": "dense",
            "dtype": "float32",
            "windows": result.windows,
            "window": config.window,
            "stride": config.stride,
            "rule": config.rule,
        },
        word_perplexity=result.word_perplexity,
        byte_perplexity=result.byte_perplexity,
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, compare, print; 1 if a value is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--perplexity", choices=PERPLEXITIES, nargs="*", default=["first"])
    parser.add_argument("--tasks", choices=TASK_VALUES, nargs="*", default=[])
    parser.add_argument("--record", type=Path, help="add the results to this JSON lines file")
    args = parser.parse_args(argv)
    commit()
    model, tokenizer, name = load_embedded()
    off = False
    for task in args.tasks:
        off |= check_task(model, tokenizer, name, task, args.data_dir, args.record)
    if args.perplexity:
        off |= check_perplexities(model, tokenizer, name, args)
    return int(off)


def check_task(
    model: WideForCausalLM,
    tokenizer: Any,
    name: str,
    task: str,
    data_dir: Path,
    record: Path | None,
) -> bool:
    """Run the task's first documents through the harness; whether the known value is off."""
    from eval.harness import HarnessConfig, WideLM
    from eval.tasks import TasksConfig, result_records, run_tasks

    metric, limit, expected = TASK_VALUES[task]
    lm = WideLM(model, tokenizer, config=HarnessConfig(progress=sys.stderr.isatty()), name=name)
    [result] = run_tasks(lm, TasksConfig((task,), data_dir=data_dir, limit=limit))
    print(f"{result.line()}; expected {metric} {expected}", flush=True)
    if record is not None:
        recipe = {"method": "dense", "dtype": "float32", "limit": limit}
        for line in result_records(lm, result, fingerprint=None, recipe=recipe):
            append_record(record, line)
    return abs(result.metrics[metric] - expected) > 0.0051  # the known values are rounded


def check_perplexities(
    model: WideForCausalLM, tokenizer: Any, name: str, args: argparse.Namespace
) -> bool:
    """Evaluate the chosen windows of WikiText-2; whether ids or values are off."""
    text, off = wikitext(args.data_dir, tokenizer), False
    if text.tokens != WIKITEXT_TOKENS:
        off = True
        print(f"WikiText-2 raw has {text.tokens} ids, expected {WIKITEXT_TOKENS}")
    for key in args.perplexity:
        config, expected = PERPLEXITIES[key]
        result = evaluate_perplexity(
            model,
            text,
            config,
            progress=lambda done, total, value: print(
                f"\r{done}/{total} windows, token perplexity {value:.2f}", end="", file=sys.stderr
            ),
        )
        print(f"\n{result.line()}; expected {expected}")
        off |= abs(result.token_perplexity - expected) > 0.01
        if args.record is not None:
            append_record(args.record, perplexity_record(name, result))
    return off


if __name__ == "__main__":
    sys.exit(main())
