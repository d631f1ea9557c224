"""Making what is missing, in order of value, several jobs side by side.

A `Job` is what a process does at a time: it makes a row's model, or one measurement of it. A kill
loses what a job was doing and nothing else: the next start goes on from the results file and the
run folders. Speed is timed while nothing else runs.
"""

import dataclasses
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol, runtime_checkable

from eval.study.plan import Row
from eval.study.settings import Measured, Part, Settings, models_at_hand, parts_of

Work = Part | Literal["model"]
LATE: dict[Work, int] = {"whole_tasks": 100, "generation": 100}  # waves after every row's own
EXCLUSIVE: frozenset[Part] = frozenset({"speed"})  # nothing runs beside them

# Seconds on one H200, for the estimate of `--dry-run`: of an update of 32,768 tokens of the 135M
# model, and of perplexity and errors, as rows of 300 updates took; the rest is guessed.
SECONDS_AN_UPDATE = {1: 0.092, 2: 0.125}
DISTILLED = 1.4
SECONDS_TO_START = 15.0
SECONDS_TO_LOAD = 5.0
SECONDS_TO_COMPILE = 60.0
SECONDS_OF: dict[Work, float] = {
    "model": 10.0,  # beside its updates
    "perplexity": 10.0,
    "tasks": 20.0,
    "errors": 10.0,
    "whole_tasks": 240.0,
    "generation": 300.0,
    "speed": 60.0,
}
TOKENS_OF_ESTIMATE = 32_768


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process does at a time."""

    row: Row
    part: Work

    @property
    def name(self) -> str:
        """As `--job` takes it, and the name of its log."""
        return f"{self.row.id}.{self.part}"

    @property
    def kind(self) -> str:
        """Jobs of one kind keep as much device memory."""
        return self.part if self.part == "model" or self.exclusive else "measurement"

    @property
    def programs(self) -> str:
        """Names what it compiles: jobs of one name find each other's."""
        return self.row.program if self.part == "model" else f"{self.row.structure}.{self.part}"

    @property
    def exclusive(self) -> bool:
        """Whether it needs the device to itself."""
        return self.part in EXCLUSIVE


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one job: on the device, and of starting and compiling, which others fill."""

    device: float
    beside: float


@runtime_checkable
class Running(Protocol):
    """A job that a process does."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


Start = Callable[[Job, bool], Running]  # a job, and whether it is only to be rehearsed


def jobs_of(rows: Sequence[Row]) -> tuple[Job, ...]:
    """Every job of the rows, in order of value.

    Wave by wave, in each first all models, then perplexities, then the rest, row by row, and last
    what runs alone.
    """

    def place(job: Job) -> tuple[int, int]:
        first: tuple[Work, ...] = ("model", "perplexity")
        rank = first.index(job.part) if job.part in first else len(first) + job.exclusive
        return LATE.get(job.part, 0) + job.row.wave, rank

    jobs = [Job(row, "model") for row in rows if row.method != "dense"]
    jobs += [Job(row, part) for row in rows for part in parts_of(row)]
    return tuple(sorted(jobs, key=place))


def missing(jobs: Sequence[Job], settings: Settings) -> tuple[Job, ...]:
    """The jobs that are left: what is not measured, and the models that this needs.

    A model that is made anew is another one: all of its row is measured again.
    """
    measured = Measured.read(settings, models_at_hand((job.row for job in jobs), settings))
    open_rows = {
        job.row.id: job.row
        for job in jobs
        if job.part != "model" and not measured.has(job.row, job.part, settings)
    }
    needed = {row.id for row in open_rows.values() if not settings.is_made(row)}
    needed |= {
        row.parent.id
        for row in open_rows.values()
        if row.id in needed and row.parent is not None and not settings.is_made(row.parent)
    }
    return tuple(
        job
        for job in jobs
        if job.row.id in needed
        or (job.part != "model" and not measured.has(job.row, job.part, settings))
    )


def with_parents(rows: Sequence[Row], every: Sequence[Row]) -> tuple[Row, ...]:
    """The rows and the stage-1 rows that they start from, as the plan `every` has them, each once.

    What is measured of a stage-2 row beside its tasks need not be measured of its stage 1.
    """
    planned = {row.id: row for row in every}
    found: dict[str, Row] = {}
    for row in rows:
        if row.parent is not None:
            found.setdefault(row.parent.id, planned[row.parent.id])
        found.setdefault(row.id, row)
    return tuple(found.values())


def is_ready(job: Job, settings: Settings) -> bool:
    """Whether what the job starts from is there."""
    if job.part != "model":
        return settings.is_made(job.row)
    return job.row.parent is None or settings.is_made(job.row.parent)


def estimate(job: Job, settings: Settings, *, first: bool) -> Estimate:
    """How long the job takes on one H200; `first`: no job before it has compiled its programs."""
    row, device = job.row, SECONDS_OF[job.part]
    beside = SECONDS_TO_START + SECONDS_TO_COMPILE if first else SECONDS_TO_LOAD
    if job.exclusive:  # two shapes are compiled, and nothing fills that time
        return Estimate(device + SECONDS_TO_START + SECONDS_TO_COMPILE, 0.0)
    if _trains(job):
        size = settings.sequence_length * settings.sequences_per_update / TOKENS_OF_ESTIMATE
        slower = 1.0 if row.distill == "off" else DISTILLED
        device += SECONDS_AN_UPDATE[row.stage] * size * slower * (row.updates or 0)
    return Estimate(device, beside)


@dataclasses.dataclass
class Outcome:
    """What became of the jobs."""

    finished: list[Job]
    failed: list[Job]
    left: list[Job]  # not begun, cut short, or waiting for one that failed


def run(
    jobs: Sequence[Job],
    settings: Settings,
    start: Start,
    *,
    slots: int,
    making: int,
    ahead: int = 0,
    deadline: float | None = None,
    say: Callable[[str], None] = print,
    pause: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the jobs, at most `slots` at once, until all are done or the deadline has come.

    A free slot takes the first job that can start, but no more than `making` of them make a model.
    With `ahead`, trainings wait until a rehearsal has compiled their program, one for all rows of
    it, in processes beside the slots. When the turn of an exclusive one comes, nothing is started
    until it has run alone.

    Args:
        jobs: in order of value.
        settings: of the study.
        start: gives a job to a process.
        slots: processes at once, rehearsals not counted.
        making: how many of them may make a model.
        ahead: rehearsals at once; 0: every training compiles for itself.
        deadline: of `clock`, in seconds; then what runs is ended.
        say: called with a line for people.
        pause: seconds between looks.
        clock: seconds, monotonic.
    """
    begun, left = clock(), list(jobs)
    outcome = Outcome([], [], [])
    rehearsed, compiled = set[str](), set[str]()  # programs: begun, and ended
    running: dict[Job, _Started] = {}

    def tell(line: str) -> None:
        say(f"{clock() - begun:.0f} s: {line}")

    def begin(job: Job, *, rehearsal: bool) -> None:
        running[job] = _Started(job, start(job, rehearsal), clock(), rehearsal)
        tell(f"{running[job].what} ...")

    def may_start(job: Job) -> bool:
        if not is_ready(job, settings) or _row_runs(job, running):
            return False
        if job.part != "model":
            return True
        if ahead and _trains(job) and job.row.program not in compiled:
            return False
        return sum(one.part == "model" for one in busy()) < making

    def busy() -> list[Job]:
        return [job for job, started in running.items() if not started.rehearsal]

    def may_rehearse(job: Job) -> bool:
        new = job.row.program not in rehearsed
        return new and _trains(job) and not _row_runs(job, running)

    try:
        while left or running:
            if deadline is not None and clock() >= deadline:
                tell("the time is over")
                break
            for job, started in list(running.items()):
                if (code := started.process.poll()) is not None:
                    del running[job]
                    ended = "done" if code == 0 else f"FAILED with code {code}, see its log"
                    tell(f"{started.what} {ended} ({clock() - started.since:.0f} s)")
                    if started.rehearsal:  # one that failed leaves compiling to the training
                        compiled.add(job.row.program)
                    else:
                        (outcome.finished if code == 0 else outcome.failed).append(job)
            waits = False
            while len(busy()) < slots and not waits:
                job = next(filter(may_start, left), None)
                if job is None:
                    break
                waits = _must_wait(job, running)
                if not waits:
                    left.remove(job)
                    begin(job, rehearsal=False)
            while len(running) - len(busy()) < ahead and not waits:
                job = next(filter(may_rehearse, left), None)
                if job is None or _must_wait(job, busy()):
                    break
                rehearsed.add(job.row.program)
                begin(job, rehearsal=True)
            if not running:
                break  # what is left waits for jobs that failed
            time.sleep(pause)
    finally:
        _end([started.process for started in running.values()])
    outcome.left = [job for job, started in running.items() if not started.rehearsal] + left
    return outcome


@dataclasses.dataclass(frozen=True)
class _Started:
    job: Job
    process: Running
    since: float
    rehearsal: bool

    @property
    def what(self) -> str:
        return f"{'rehearsal of ' if self.rehearsal else ''}{self.job.name}"


def _row_runs(job: Job, running: Collection[Job]) -> bool:
    """Whether another job of its row runs."""
    return any(other.row.id == job.row.id for other in running)


def _trains(job: Job) -> bool:
    """Whether the job's model is a trained one."""
    return job.part == "model" and job.row.stage > 0


def _must_wait(job: Job, running: Collection[Job]) -> bool:
    """Whether the job, or one that runs, wants the device to itself."""
    return any(one.exclusive for one in (job, *running)) and bool(running)


def _end(processes: Sequence[Running]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
