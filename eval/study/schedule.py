"""Making what is missing, in order of value, several rows side by side in processes of their own.

A `Job` is what one process does: a row's model and perplexity (`core`), or one more measurement of
it. A kill loses what a job was doing and nothing else: the next start goes on from the results
file and the run folders. Speed is timed while nothing else runs.
"""

import dataclasses
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from eval.study.plan import Row
from eval.study.settings import Measured, Part, Settings, parts_of

LATE: dict[str, int] = {"whole_tasks": 100, "generation": 100}  # waves after every row's own
EXCLUSIVE: frozenset[Part] = frozenset({"speed"})  # nothing runs beside them

# Seconds on one H200, for the estimate of `--dry-run`: of an update of 32,768 tokens of the 135M
# model, and of perplexity and errors, as rows of 300 updates took; the rest is guessed.
SECONDS_AN_UPDATE = {1: 0.092, 2: 0.125}
DISTILLED = 1.4
SECONDS_TO_START = 15.0
SECONDS_TO_COMPILE = 60.0
SECONDS_OF: dict[Part, float] = {
    "perplexity": 10.0,
    "tasks": 60.0,
    "errors": 20.0,
    "whole_tasks": 240.0,
    "generation": 300.0,
    "speed": 60.0,
}
TOKENS_OF_ESTIMATE = 32_768


@dataclasses.dataclass(frozen=True)
class Job:
    """One process's work."""

    row: Row
    part: Part

    @property
    def name(self) -> str:
        """As `--job` takes it, and the name of its log."""
        return f"{self.row.id}.{self.part}"

    @property
    def core(self) -> bool:
        """Whether it makes the row's model too."""
        return self.part == "perplexity"

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
    """A started process."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


Start = Callable[[Job, bool], Running]  # a job, and whether it is only to be rehearsed


def jobs_of(rows: Sequence[Row]) -> tuple[Job, ...]:
    """Every job of the rows, in order of value.

    Wave by wave, in each first all models and perplexities, then the rest, row by row, and last
    what runs alone.
    """

    def place(job: Job) -> tuple[int, bool, bool]:
        return LATE.get(job.part, 0) + job.row.wave, not job.core, job.exclusive

    return tuple(sorted((Job(row, part) for row in rows for part in parts_of(row)), key=place))


def missing(jobs: Sequence[Job], settings: Settings) -> tuple[Job, ...]:
    """The jobs that are left: not measured, or whose row's model another one needs."""
    measured = Measured.read(settings)
    open_jobs = [job for job in jobs if not measured.has(job.row, job.part, settings)]
    needed = {job.row.id for job in open_jobs}
    needed |= {job.row.parent.id for job in open_jobs if job.row.parent is not None}
    return tuple(
        job
        for job in jobs
        if job in open_jobs or (job.core and job.row.id in needed and not settings.is_made(job.row))
    )


def with_parents(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows and the stage-1 rows that they start from, each once."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.parent is not None:
            found.setdefault(row.parent.id, row.parent)
        found.setdefault(row.id, row)
    return tuple(found.values())


def is_ready(job: Job, settings: Settings) -> bool:
    """Whether what the job starts from is there."""
    if not job.core:
        return settings.is_made(job.row)
    return job.row.parent is None or settings.is_made(job.row) or settings.is_made(job.row.parent)


def estimate(job: Job, settings: Settings) -> Estimate:
    """How long the job takes on one H200."""
    row, device = job.row, SECONDS_OF[job.part]
    beside = SECONDS_TO_START + SECONDS_TO_COMPILE / 2
    if job.exclusive:  # two shapes are compiled, and nothing fills that time
        return Estimate(device + SECONDS_TO_START + SECONDS_TO_COMPILE, 0.0)
    if job.core and row.stage and not settings.is_made(row):
        size = settings.sequence_length * settings.sequences_per_update / TOKENS_OF_ESTIMATE
        slower = 1.0 if row.distill == "off" else DISTILLED
        device += SECONDS_AN_UPDATE[row.stage] * size * slower * (row.updates or 0)
        beside += SECONDS_TO_COMPILE
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
    deadline: float | None = None,
    say: Callable[[str], None] = print,
    pause: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the jobs, at most `slots` at once, until all are done or the deadline has come.

    A free slot takes the first job. One that waits for its stage 1 is rehearsed meanwhile, so that
    its program is compiled when the stage 1 is there; once for all rows of that program. When the
    turn of an exclusive one comes, nothing is started until it has run alone.

    Args:
        jobs: in order of value.
        settings: of the study.
        start: starts a job's process.
        slots: processes at once.
        deadline: of `clock`, in seconds; then what runs is ended.
        say: called with a line for people.
        pause: seconds between looks.
        clock: seconds, monotonic.
    """
    begun, left = clock(), list(jobs)
    outcome = Outcome([], [], [])
    compiled = set[str]()  # programs that a process has begun to compile
    if slots == 1:  # alone, a rehearsal would only cost time
        compiled = {job.row.program for job in jobs}
    running: dict[Job, _Started] = {}

    def tell(line: str) -> None:
        say(f"{clock() - begun:.0f} s: {line}")

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
                    if not started.rehearsal:
                        (outcome.finished if code == 0 else outcome.failed).append(job)
            while len(running) < slots:
                job = next((j for j in left if _may_start(j, running, compiled, settings)), None)
                if job is None or _must_wait(job, running):
                    break
                rehearsal = not is_ready(job, settings)
                if not rehearsal:
                    left.remove(job)
                if job.core:
                    compiled.add(job.row.program)
                running[job] = _Started(job, start(job, rehearsal), clock(), rehearsal)
                tell(f"{running[job].what} ...")
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


def _may_start(
    job: Job, running: Collection[Job], compiled: Collection[str], settings: Settings
) -> bool:
    """Whether the job, or its rehearsal, can start: no other of its row runs."""
    if any(other.row.id == job.row.id for other in running):
        return False
    return is_ready(job, settings) or (job.core and job.row.program not in compiled)


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
