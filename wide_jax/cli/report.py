"""`wide report`: one report from run folders, every figure traceable to its record."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from eval.report import write_report
from wide_jax.cli.extras import require_eval_extra


@dataclasses.dataclass(frozen=True)
class Args:
    """Tables and figures from the result records of run folders, as Markdown and HTML."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS")]
    """Folders (or .jsonl files) of result records."""
    out: Path = Path("report")
    """Folder for report.md, report.html and figures/."""


def main(args: Args) -> None:
    """Write the report and say where it is."""
    if not args.runs:
        raise ValueError("name at least one run folder or results file")
    require_eval_extra("matplotlib")
    path = write_report(args.runs, args.out)
    Console().print(f"report: [bold]{path}[/bold]", soft_wrap=True)
