"""Running a model's code in an interpreter without network, with time, memory and file limits.

The child has its own session, an empty environment and an empty temporary folder; rlimits bound
its CPU time, memory, file size and open files; where the system lets it, it has no network
devices. An audit hook in it (`eval/sandbox_child.py`) refuses sockets, new processes, ctypes, and
files outside its folder (Python's own library may be read). This stops what a model writes by
accident; it is no wall against code made to break out: for that, evaluate in a container.
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
from typing import Literal

Outcome = Literal["passed", "failed", "timeout"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    open_files: int = 64


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
        "open_files": limits.open_files,
    }
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = child.communicate(json.dumps(job).encode(), limits.seconds)
        except subprocess.TimeoutExpired:
            return Verdict("timeout", f"more than {limits.seconds:g} s")
        finally:
            _end(child)
    if child.returncode == 0 and output.decode(errors="replace").rstrip().endswith(token):
        return Verdict("passed", "")
    if child.returncode == -signal.SIGXCPU:
        return Verdict("timeout", f"more than {limits.seconds:g} s of CPU")
    lines = errors.decode(errors="replace").strip().splitlines()
    return Verdict("failed", lines[-1] if lines else f"ended with code {child.returncode}")


def _end(child: subprocess.Popen) -> None:
    """Kill the child and whatever it started; close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
