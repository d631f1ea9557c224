"""`python -m eval.study --out FOLDER`: make what is missing of the study, in order of value."""

import dataclasses
import fnmatch
import os
import signal
import sys
import time
from collections.abc import Sequence

import tyro
from rich.console import Console

from eval.records import commit
from eval.study.plan import Recipe, plan
from eval.study.schedule import (
    Estimate,
    Job,
    Outcome,
    estimate,
    is_ready,
    jobs_of,
    missing,
    run,
    with_parents,
)
from eval.study.settings import Measured, Settings, check_contents
from eval.study.trainings import append_trainings
from eval.study.workers import Workers, serve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(Settings):
    """Make the study: train and measure every row that is not in the results yet.

    Run again, it goes on: finished measurements are known by their records, trainings resume by
    their own checkpoints. `--dry-run` says what would be done and about how long it takes.
    """

    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    dry_run: bool = False
    """Print the plan and an estimate of the time; make nothing."""
    only: str = "*"
    """Rows whose id matches (`*` and `?` as in file names), several with commas; and the stage-1
    rows that they need."""
    parts: str = "*"
    """Measurements to make: perplexity, tasks, errors, whole_tasks, generation, speed, with commas.
    The last needs a GPU, and has it to itself."""
    budget_minutes: float | None = None
    """Stop after so long; what was not finished goes on at the next start."""
    jobs: int = 1
    """Jobs side by side. One trains at a time; others measure beside it, but for speed, which is
    measured alone."""
    making: int = 2
    """How many of them may make a model: one trains while the next starts. Each keeps 20 to 40 GiB
    of the device's memory (135M parameters, 32,768 tokens an update): 1 on a smaller card."""
    ahead: int = 0
    """Processes more that compile the trainings to come, each program once for all rows of it."""
    job: str | None = None
    """Do this one job in this process."""
    serve: int | None = None
    """Do the jobs named on the standard input in this process, as the command itself asks for, and
    answer on this file descriptor."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a job failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = tyro.cli(Args, args=argv, prog="python -m eval.study")
    console = Console()
    planned = plan(args.recipe)
    rows = with_parents([row for row in planned if _matches(row.id, args.only)], planned)
    every = [job for job in jobs_of(rows) if job.part == "model" or _matches(job.part, args.parts)]
    named = {job.name: job for job in every}
    if args.job is not None and args.job not in named:
        raise ValueError(f"no job {args.job!r}: they are ROW.PART, as `--dry-run` lists the two")
    if args.job is not None:
        _work(named[args.job], args, console)
        return 0
    if args.serve is not None:
        given = sys.argv[:-2]

        def work(name: str, rehearsal: bool) -> None:
            sys.argv = [*given, "--job", name]  # records name the command that makes them
            _work(named[name], args, console, rehearsal=rehearsal)

        serve(work, args.serve)
        return 0
    left = missing(every, args)
    show(console, every, left, args)
    if args.dry_run or not left:
        return 0
    check_contents(args)
    if (now := commit()) is not None:
        os.environ["WIDE_COMMIT"] = now  # for all processes, whenever they start
    deadline = None
    if args.budget_minutes is not None:
        deadline = time.monotonic() + 60 * args.budget_minutes
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends jobs too
    command = [sys.executable, "-m", "eval.study", *argv, "--serve"]
    with Workers(command, args.out / "logs", args.jobs + args.ahead) as workers:
        outcome = run(
            left,
            args,
            workers.start,
            slots=args.jobs,
            making=args.making,
            ahead=args.ahead,
            deadline=deadline,
            say=lambda line: console.print(line, highlight=False, soft_wrap=True),
        )
    append_trainings(args, rows)
    return _report(console, outcome)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in patterns.split(","))


def _work(job: Job, args: Args, console: Console, *, rehearsal: bool = False) -> None:
    """One job in this process; its row's model first, where that is not there."""
    from eval.study.make import make, rehearse
    from eval.study.measure import measure
    from wide_jax.cli.start import start

    start("auto", console)
    check_contents(args)
    if rehearsal:
        rehearse(job.row, args, console)
        return
    make(job.row, args, console)
    if job.part != "model":
        measure(job.row, job.part, args, console)


def show(console: Console, jobs: Sequence[Job], left: Sequence[Job], settings: Settings) -> None:
    """The plan, a line a job, and the estimated time of what is left."""
    total, compiled = Estimate(0.0, 0.0), set[str]()
    measured = {row for row, *_ in Measured.read(settings).found}
    for job in jobs:
        line = f"{job.row.wave} {job.row.id:50} {job.part:12} "
        if job in left:
            found = estimate(job, settings, first=job.programs not in compiled)
            compiled.add(job.programs)
            total = Estimate(total.device + found.device, total.beside + found.beside)
            state = "to do" if is_ready(job, settings) else "waits"
            line += f"{state}  {found.device:4.0f} s + {found.beside:.0f} s"
            if job.part == "model" and job.row.id in measured:
                line += "; its figures will be made anew"
        else:
            line += "done"
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"{len(left)} of {len(jobs)} jobs are left: about {total.device / 60:.0f} minutes of one "
        f"H200, and {total.beside / 60:.0f} of starting and compiling, which `--jobs` and "
        "`--ahead` overlap",
        highlight=False,
        soft_wrap=True,
    )


def _report(console: Console, outcome: Outcome) -> int:
    for title, jobs in (("failed", outcome.failed), ("left", outcome.left)):
        if jobs:
            names = ", ".join(job.name for job in jobs)
            console.print(f"{title}: {names}", highlight=False, soft_wrap=True)
    console.print(f"{len(outcome.finished)} jobs done", highlight=False)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
