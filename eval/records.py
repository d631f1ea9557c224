"""Result records: one JSON object a line, appended by the command that measured it, never edited.

Every suite has the common fields (`common_fields`) and its own (`FIELDS`); a record that lacks one
is refused when it is written, so that plots and tables never meet half a record. Optional fields
are present and null.
"""

import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

Suite = Literal["kernels", "e2e", "train", "eval", "errors", "parity", "engine", "study"]

COMMON = ("suite", "time", "commit", "command", "device", "device_count", "versions")
ACCOUNTING = ("attention", "ffn", "paper", "parameters", "flops", "bytes")
_EVAL = (
    *("model", "task", "metric", "value", "stderr", "n", "accounting", "recipe", "seed"),
    "updates",
)
# `kernels` and `e2e` also take further fields; these are what their plots cannot do without.
FIELDS: Mapping[Suite, tuple[str, ...]] = {
    "kernels": ("op", "case", "shape", "dtype", "sparsity", "mask", "implementation", "ms"),
    "e2e": ("model", "phase", "batch", "tokens", "sparsity", "mask", "variant", "ms"),
    "train": ("model", "stage", "mesh", "sequence", "tokens_per_second", "mfu", "peak_gib"),
    "eval": _EVAL,
    "errors": ("model", "task", "tokens", "layers", "accounting", "recipe"),
    "engine": ("model", "decisions", "float32_flipped", "bf16_error", "bf16_plain_error"),
    "study": (*_EVAL, "row", "part", "settings"),
    "parity": ("model", "task", "n", "token_ids_equal", "max_difference", "accuracy"),
}
RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "triton", "jax_triton", "flax")


def common_fields(suite: Suite, *, command: str | None = None) -> dict[str, Any]:
    """When, from which code, by which command, on which device (this starts it) and versions."""
    import jax

    devices = jax.devices()
    return {
        "suite": suite,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command_line() if command is None else command,
        "device": devices[0].device_kind,
        "device_count": len(devices),
        "versions": versions(),
    }


def eval_record(
    *,
    model: str,
    task: str,
    metric: str,
    value: float,
    stderr: float | None,
    n: int,
    accounting: Mapping[str, float],
    recipe: Mapping[str, Any],
    seed: int | None = None,
    updates: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A complete record of the `eval` suite; `metric` names its unit (token_perplexity, acc)."""
    return common_fields("eval") | {
        "model": model,
        "task": task,
        "metric": metric,
        "value": value,
        "stderr": stderr,
        "n": n,
        "accounting": {name: accounting[name] for name in ACCOUNTING},
        "recipe": dict(recipe),
        "seed": seed,
        "updates": updates,
        **more,
    }


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Add one line to a results file; concurrent writers do not mix their lines.

    Raises:
        ValueError: an unknown suite, missing fields, or a number that JSON cannot hold (NaN).
    """
    check_record(record, str(path))
    line = (json.dumps(record, allow_nan=False) + "\n").encode("utf-8")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written != len(line):
        raise OSError(
            f"{path}: wrote {written} of {len(line)} bytes of a record: is the disk full?"
        )


def read_records(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and record of every line.

    Raises:
        ValueError: a line that is no record; the message names file, line and what is missing.
    """
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected an object, found {type(record).__name__}")
        check_record(record, f"{path}:{number}")
        yield number, record


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless the record has its suite's fields and only finite numbers."""
    suite = record.get("suite")
    if suite not in FIELDS:
        raise ValueError(f"{where}: suite {suite!r} is none of {', '.join(FIELDS)}")
    missing = [name for name in (*COMMON, *FIELDS[suite]) if name not in record]
    if missing:
        raise ValueError(f"{where}: a record of suite {suite!r} lacks {', '.join(missing)}")
    bad = [name for name, value in record.items() if not _finite(value)]
    if bad:
        raise ValueError(f"{where}: not finite: {', '.join(bad)}; a failed run is not a result")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide results; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@functools.cache
def commit() -> str | None:
    """The commit this code is at, with `+` if tracked files differ.

    The environment's WIDE_COMMIT comes first: a copy of the files that runs on another machine may
    sit in a checkout whose head is not what was copied.

    Asked once a process: a long command calls it when it starts, so that commits made while it
    runs do not get into its records.
    """
    if named := os.environ.get("WIDE_COMMIT"):
        return named
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def command_line() -> str:
    """The running command, without this machine's path to it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name != "__main__":
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        program = [Path(sys.argv[0]).name or "python"]
    return shlex.join([*program, *sys.argv[1:]])


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(item) for item in value)
    return True
