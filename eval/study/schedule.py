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
# Trainings at once, where their programs are compiled ahead: one trains while the next starts. A
# process keeps a training's 20 to 30 GiB until it ends.
TRAINING = 2

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
    ahead: int = 0,
    deadline: float | None = None,
    say: Callable[[str], None] = print,
    pause: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the jobs, at most `slots` at once, until all are done or the deadline has come.

    A free slot takes the first job that can start. With `ahead`, trainings wait until a rehearsal
    has compiled their program, one for all rows of it, in processes beside the slots. When the turn
    of an exclusive one comes, nothing is started until it has run alone.

    Args:
        jobs: in order of value.
        settings: of the study.
        start: starts a job's process.
        slots: processes at once, rehearsals not counted.
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
        if not ahead or not _trains(job, settings):
            return True
        trainings = sum(_trains(one, settings) for one in busy())
        return job.row.program in compiled and trainings < TRAINING

    def busy() -> list[Job]:
        return [job for job, started in running.items() if not started.rehearsal]

    def may_rehearse(job: Job) -> bool:
        new = job.row.program not in rehearsed
        return new and _trains(job, settings) and not _row_runs(job, running)

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


def _trains(job: Job, settings: Settings) -> bool:
    """Whether the job has a model to train."""
    return job.core and job.row.stage > 0 and not settings.is_made(job.row)


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
