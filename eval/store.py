"""Answered requests of a run, kept so that an interrupted run goes on where it stopped.

One JSON object a line: first the settings the answers depend on, then a line a device batch with
its requests' keys, their answers, and what ran to get them; so the accounting of a resumed run
still covers every token of it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eval.scoring import Ran
from wide_jax.accounting import Usage


@dataclasses.dataclass(frozen=True)
class Answered:
    """One batch: answers by request key, and what ran in each phase."""

    answers: Mapping[str, Any]
    prefill: Ran
    decode: Ran = dataclasses.field(default_factory=Ran)


class RequestStore:
    """The file of one task's answers.

    Args:
        path: made with its folder where absent; None keeps answers in memory only.
        settings: whatever an answer depends on (model, routing, lengths ...).

    Raises:
        ValueError: the file was made with other settings; it names them.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        self.path = path
        self.batches: list[Answered] = []
        if path is None:
            return
        header = {"settings": dict(settings)}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = list(_complete_lines(path)) if path.exists() else []
        if not lines:
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")
            return
        found = lines[0].get("settings", {})
        if found != json.loads(json.dumps(header))["settings"]:
            names = sorted(set(found) | set(settings))
            differ = [n for n in names if found.get(n) != header["settings"].get(n)]
            raise ValueError(
                f"{path} was made with other settings ({', '.join(differ)} differ): go on with "
                "the same ones, or choose another output folder"
            )
        self.batches = [_from_json(line) for line in lines[1:]]

    def answers(self) -> dict[str, Any]:
        """Every answer so far, by request key."""
        return {key: value for batch in self.batches for key, value in batch.answers.items()}

    def add(self, batch: Answered) -> None:
        """Keep a batch; on disk when this returns."""
        self.batches.append(batch)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(_to_json(batch)) + "\n")
                stream.flush()
                os.fsync(stream.fileno())

    def ran(self) -> tuple[Ran, Ran]:
        """What ran for all answers: prefill, decode."""
        prefill = sum((batch.prefill for batch in self.batches), Ran())
        return prefill, sum((batch.decode for batch in self.batches), Ran())


def request_key(kind: str, *parts: Any) -> str:
    """What identifies a request: its kind, and its ids and settings as JSON."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode("utf-8")).hexdigest()[:32]


def _complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of the file; a last line cut off by a crash is removed from it."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    for number, line in enumerate(whole.decode("utf-8").splitlines(), start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}; delete the file") from error


def _to_json(batch: Answered) -> dict[str, Any]:
    return {
        "answers": dict(batch.answers),
        "prefill": _ran_to_json(batch.prefill),
        "decode": _ran_to_json(batch.decode),
    }


def _from_json(record: Mapping[str, Any]) -> Answered:
    return Answered(
        record["answers"], _ran_from_json(record["prefill"]), _ran_from_json(record["decode"])
    )


def _ran_to_json(ran: Ran) -> dict[str, Any]:
    usage = None
    if ran.usage is not None:
        usage = {
            field.name: np.asarray(getattr(ran.usage, field.name)).tolist()
            for field in dataclasses.fields(Usage)
        }
    return {"tokens": ran.tokens, "keys": ran.keys, "usage": usage}


def _ran_from_json(record: Mapping[str, Any]) -> Ran:
    usage = record["usage"]
    if usage is not None:
        counts = {name: usage[name] for name in ("attn_groups", "ffn_groups")}
        sums: dict[str, Any] = {
            name: np.asarray(value, np.float64)
            for name, value in usage.items()
            if name not in counts
        }
        usage = Usage(**sums, **counts)
    return Ran(record["tokens"], record["keys"], usage)
