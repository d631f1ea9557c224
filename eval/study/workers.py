"""Processes that do one job after another.

A job of its own process spends most of its time on starting and on tracing and compiling what the
job before it had compiled. A worker has started already, and what measures a model it has for every
model of that structure; it is given the jobs of one kind. It keeps its device memory until it ends.
Idle ones are ended when there are too many and another kind is needed, all of them before a job
that wants the device to itself, and that one's before any other job.
"""

import contextlib
import dataclasses
import gc
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from eval.study.schedule import EXCLUSIVE, Job


class Workers:
    """Workers that are started as they are needed, at most `most` at once."""

    def __init__(self, command: Sequence[str], logs: Path, most: int):
        """Of processes that run `command` and a number, the descriptor that it hands to `serve`.

        Logs, one a job, go to the folder `logs`.
        """
        self._command, self._logs, self._most = tuple(command), logs, most
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self._end(self._workers)

    def start(self, job: Job, rehearsal: bool) -> "Given":
        """Give the job to a worker: one of its kind, before others one that knows its structure."""
        kind = "rehearsal" if rehearsal else job.kind
        log = self._logs / f"{job.name}{'.rehearsal' if rehearsal else ''}.log"

        def is_in_the_way(worker: _Worker) -> bool:
            return worker.kind != kind and (job.exclusive or worker.kind in EXCLUSIVE)

        self._end([one for one in self._idle if not one.alive or is_in_the_way(one)])
        same = [one for one in self._idle if one.kind == kind]
        worker = min(same, key=lambda one: job.row.structure not in one.structures, default=None)
        if worker is None:
            if len(self._workers) >= self._most:
                self._end(self._idle[:1])
            worker = _Worker(self._command, kind, log)
            self._workers.append(worker)
        return worker.give(job, rehearsal, log)

    @property
    def _idle(self) -> list["_Worker"]:
        return [worker for worker in self._workers if not worker.busy]

    def _end(self, workers: Sequence["_Worker"]) -> None:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        self._workers = [worker for worker in self._workers if worker not in workers]


class _Worker:
    """A process, its requests on its standard input, its answers on a pipe of their own."""

    def __init__(self, command: Sequence[str], kind: str, log: Path):
        self.kind, self.structures, self.busy = kind, set[str](), False
        self._answers, theirs = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as early:  # what is said before the first job is taken
            self._process = subprocess.Popen(
                (*command, str(theirs)),
                stdin=subprocess.PIPE,
                stdout=early,
                stderr=early,
                pass_fds=(theirs,),
            )
        os.close(theirs)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def give(self, job: Job, rehearsal: bool, log: Path) -> "Given":
        request = _Request(job.name, rehearsal, str(log))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended just now: `answer` says so
            self._process.stdin.write(json.dumps(dataclasses.asdict(request)).encode() + b"\n")
            self._process.stdin.flush()
        self.busy = True
        self.structures.add(job.row.structure)
        return Given(self)

    def answer(self) -> int | None:
        """The job's exit status, or that of a process that ended without one; None: not yet."""
        if not select.select([self._answers], [], [], 0)[0]:
            return None
        if os.read(self._answers, 1):
            self.busy = False
            return 0
        if self.alive:  # it has closed its end, and takes its time to go
            return None
        self.busy = False
        return self.wait() or 1

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        code = self._process.wait(timeout)
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        return code


class Given:
    """A job that a worker has; ending it ends the worker."""

    def __init__(self, worker: _Worker):
        self._worker = worker
        self.terminate, self.kill, self.wait = worker.terminate, worker.kill, worker.wait
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        if self._code is None:
            self._code = self._worker.answer()
        return self._code


@dataclasses.dataclass(frozen=True)
class _Request:
    """A line of a worker's standard input."""

    job: str
    rehearsal: bool
    log: str


def serve(work: Callable[[str, bool], None], answers: int) -> None:
    """Do the jobs named on the standard input, each with its log, until that ends or one fails.

    `work` takes a job's name and whether it is only rehearsed; what it and its libraries print is
    in the log, and what it raises ends the process. The file descriptor `answers` gets a byte after
    each job that is done.
    """
    for line in sys.stdin:
        request = _Request(**json.loads(line))
        _log_to(Path(request.log))
        work(request.job, request.rehearsal)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.write(answers, b".")
        gc.collect()  # what the job had on the device


def _log_to(path: Path) -> None:
    with path.open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
