"""`wide eval ppl`: perplexity of a text, with what the masks skipped of those very tokens."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from eval.perplexity import PerplexityConfig, PerplexityResult, cut, evaluate_perplexity
from eval.records import append_record, commit, common_fields, eval_record
from eval.scoring import default_routing
from eval.speed import Speedup, measure_speedup, worth_timing
from eval.text import read_text, tokenize
from eval.windows import WindowRule
from wide_jax.cli.files import check_writable_file, write_json
from wide_jax.cli.models import DType, LoadedModel, load_model
from wide_jax.cli.progress import progress
from wide_jax.cli.start import Platform, start
from wide_jax.routing import AllOn


@dataclasses.dataclass(frozen=True)
class Args:
    """Perplexity of a text per token, word and byte, with the accounting of what was skipped.

    A WIDE model folder is evaluated with its routers (argmax); --dense leaves them out.
    """

    data: Path
    """The text: .txt (one document) or .jsonl (field `text` or `page`), either also .gz."""
    model: str | None = None
    """A model folder or Hugging Face id; by default the embedded SmolLM2-135M-Instruct."""
    dense: bool = False
    """Run every group, whatever routers the folder has."""
    rule: WindowRule = "disjoint"
    """How the text is cut. `disjoint`: documents joined, no start token, each window's first token
    is not scored. `rolling`: the lm-evaluation-harness rule, every token of every document."""
    window: int = 2048
    """Tokens the model sees at once; windows do not overlap (the stride is the window)."""
    max_windows: int | None = None
    """Only the first so many windows."""
    timing: bool = True
    """On a GPU, also measure how much faster the routed model runs these tokens."""
    batch_size: int = 1
    """Windows at once; the figures do not depend on it."""
    dtype: DType = "checkpoint"
    """Precision of weights and activations."""
    json: Path | None = None
    """Also write every figure to this file."""
    record: Path | None = None
    """Append a result record (suite `eval`, task named after the text's file) to this file."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


def main(args: Args) -> None:
    """Evaluate and print a line of perplexities and a line of accounting."""
    console = Console()
    text = read_text(args.data)
    if args.json is not None:
        check_writable_file(args.json)
    if args.record is not None:
        check_writable_file(args.record)
    commit()  # asked once a process: what is committed while this runs is not what ran
    start(args.platform, console)
    loaded = load_model(console, args.model, dense=args.dense, dtype=args.dtype)
    model = loaded.model
    config = PerplexityConfig(
        rule=args.rule,
        window=args.window,
        max_windows=args.max_windows,
        batch_size=args.batch_size,
        prefix_token=_prefix_token(model.config) if args.rule == "rolling" else None,
    )
    tokens = tokenize(text, loaded.encode, join=config.joined)
    with progress(console, "evaluating") as advance:
        result = evaluate_perplexity(
            model,
            tokens,
            config,
            routing=AllOn() if args.dense else None,
            progress=lambda done, total, value: advance(done, total, f"perplexity {value:.2f}"),
        )
    report(console, result)
    speedup = None
    if args.timing and not args.dense and worth_timing(default_routing(model)):
        ids = np.concatenate([window.inputs for window in cut(tokens, config)])
        speedup = measure_speedup(model, ids)
        console.print(speedup.line(), highlight=False, soft_wrap=True)
    if args.json is not None:
        figures = result.to_json() | {"speedup": None if speedup is None else speedup.to_json()}
        made = common_fields("eval") | loaded.described() | {"data": str(args.data)}
        write_json(args.json, made | figures)
    if args.record is not None:
        append_record(args.record, to_record(args, loaded, result, speedup))


def report(console: Console, result: PerplexityResult) -> None:
    """Print the result's line and its accounting."""
    console.print(result.line(), highlight=False, soft_wrap=True)
    console.print(result.accounting.line(), highlight=False, soft_wrap=True)


def to_record(
    args: Args, loaded: LoadedModel, result: PerplexityResult, speedup: Speedup | None = None
) -> dict[str, Any]:
    """The result as a record of the `eval` suite."""
    recipe: dict[str, Any] = {"method": "dense"} if args.dense else loaded.recipe()
    dtype = loaded.model.dtype.name
    return eval_record(
        model=loaded.fingerprint(),
        name=loaded.name,
        task=args.data.name.partition(".")[0],
        metric="token_perplexity",
        value=result.token_perplexity,
        stderr=result.token_perplexity_stderr,
        n=result.scored_tokens,
        accounting=result.accounting.summary(),
        recipe=recipe | {"dtype": dtype, "rule": args.rule, "window": args.window},
        seed=recipe.get("seed"),
        updates=recipe.get("updates"),
        word_perplexity=result.word_perplexity,
        layers=result.accounting.by_layer(),
        speedup=None if speedup is None else speedup.to_json(),
    )


def _prefix_token(config) -> int:
    if config.bos_token_id is not None:
        return config.bos_token_id
    if config.eos_token_ids:
        return config.eos_token_ids[0]
    raise ValueError("the model names neither a BOS nor an EOS token: use --rule disjoint")
