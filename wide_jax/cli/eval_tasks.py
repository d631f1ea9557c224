"""`wide eval tasks`: tasks of lm-evaluation-harness, with what the masks skipped."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from wide_jax.cli.models import DType, load_model
from wide_jax.cli.start import Platform, start
from wide_jax.routing import AllOn


@dataclasses.dataclass(frozen=True)
class Args:
    """Tasks of lm-evaluation-harness, by its own definitions (needs the `eval` extra).

    Every result carries the accounting of the very tokens evaluated. A run that was cut short goes
    on when the same command is given again.
    """

    tasks: str
    """Names, separated by commas: wikitext, arc_easy, arc_challenge, boolq, winogrande, piqa,
    openbookqa, hellaswag, mmlu, gsm8k, ifeval, mbpp_plus, or any other of the harness."""
    model: str | None = None
    """A model folder or Hugging Face id; by default the embedded SmolLM2-135M-Instruct."""
    dense: bool = False
    """Run every group, whatever routers the folder has."""
    data_dir: Path | None = None
    """Folder of local task data, for work without a network; by default the harness downloads."""
    out: Path | None = None
    """Folder for results, and for answers to go on from."""
    limit: int | None = None
    """Only the first so many documents of each task (mmlu: of each subject)."""
    num_fewshot: int | None = None
    """Examples before each question; by default the task's own (5 for mmlu)."""
    chat: bool = False
    """Put prompts into the model's chat template."""
    system: str | None = None
    """System prompt, with --chat."""
    samples: bool = False
    """Also write every document with its answers."""
    batch_size: int = 8
    """Rows at once; the figures do not depend on it."""
    timing: bool = True
    """On a GPU, also measure how much faster the routed model runs each task's tokens."""
    dtype: DType = "checkpoint"
    """Precision of weights and activations."""
    platform: Annotated[Platform, tyro.conf.arg(metavar="{auto,cpu,gpu}")] = "auto"
    """Where to compute; `gpu` fails where there is none."""


def main(args: Args) -> None:
    """Run the tasks and print a line of metrics and a line of accounting for each."""
    console = Console()
    try:
        from eval.harness import HarnessConfig, WideLM
        from eval.tasks import TaskResult, TasksConfig, check_tasks, run_tasks
    except ImportError as error:
        raise RuntimeError(
            f"{error}: install the eval extra, pip install 'wide-jax[eval]'"
        ) from error
    names = tuple(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    tasks = TasksConfig(
        tasks=names,
        data_dir=args.data_dir,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        chat=args.chat,
        system=args.system,
        samples=args.samples,
        timing=args.timing,
    )
    check_tasks(tasks)
    start(args.platform, console)
    loaded = load_model(console, args.model, dense=args.dense, dtype=args.dtype)
    lm = WideLM(
        loaded.model,
        loaded.tokenizer,
        config=HarnessConfig(batch_size=args.batch_size),
        routing=AllOn() if args.dense else None,
        name=loaded.name,
    )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)

    def report(result: TaskResult) -> None:
        console.print(result.line(), highlight=False, soft_wrap=True)
        console.print(f"  prefill {result.prefill.line()}", highlight=False, soft_wrap=True)
        if result.decode is not None:
            console.print(f"  decode {result.decode.line()}", highlight=False, soft_wrap=True)
        if result.speedup is not None:
            console.print(f"  {result.speedup.line()}", highlight=False, soft_wrap=True)

    run_tasks(
        lm,
        tasks,
        out=args.out,
        fingerprint=loaded.fingerprint(),
        recipe=loaded.recipe(),
        on_result=report,
    )
    if args.out is not None:
        console.print(f"results: [bold]{args.out}[/bold]", soft_wrap=True)
