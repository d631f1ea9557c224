"""Running a model's code in an interpreter without network, with time, memory and file limits.

The child has its own session, an empty environment and an empty temporary folder; rlimits bound
its CPU time, memory, file size and open files; where the system lets it, it has no network
devices. An audit hook in it (`eval/sandbox_child.py`) refuses sockets, new processes, ctypes, and
files and folders outside its own (Python's own library may be read). What it prints is thrown
away, so that it cannot fill this process's memory. This stops what a model writes by accident; it
is no wall against code made to break out: for that, evaluate in a container.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO, Literal

Outcome = Literal["passed", "failed", "timeout"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    files: int = 64  # open at once, and made or opened for writing in all


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a program ended; `detail` is the last line of its error output."""

    outcome: Outcome
    detail: str


CHILD = Path(__file__).with_name("sandbox_child.py")


def run(program: str, limits: Limits | None = None) -> Verdict:
    """Run a Python program to its end.

    Only a program that reaches its last line has passed: an early `exit()` has not.
    """
    limits = Limits() if limits is None else limits
    token = secrets.token_hex(16)
    job = {
        "program": program,
        "token": token,
        "cpu_seconds": int(limits.seconds) + 1,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "files": limits.files,
    }
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
        tempfile.TemporaryFile() as output,  # files, not pipes: they too are limited in size
        tempfile.TemporaryFile() as errors,
    ):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            child.communicate(json.dumps(job).encode(), limits.seconds)
        except subprocess.TimeoutExpired:
            return Verdict("timeout", f"more than {limits.seconds:g} s")
        finally:
            _end(child)
        passed = _last(output) == token
        lines = _last(errors).strip().splitlines()
    if child.returncode == 0 and passed:
        return Verdict("passed", "")
    if child.returncode == -signal.SIGXCPU:
        return Verdict("timeout", f"more than {limits.seconds:g} s of CPU")
    return Verdict("failed", lines[-1] if lines else f"ended with code {child.returncode}")


def _last(file: BinaryIO, size: int = 4096) -> str:
    """The end of a file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read().decode(errors="replace")


def _end(child: subprocess.Popen) -> None:
    """Kill the child and whatever it started; close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
