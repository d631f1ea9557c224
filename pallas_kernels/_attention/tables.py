"""Attention's checked-in tables: the fastest implementation and tile sizes, by device kind.

Like the products' (`_common/tuned.py`), with the shape attention has. A table that was not measured
on its device says so and names the model it was derived from.
"""

import dataclasses
import functools
import json
from typing import Any

from pallas_kernels._attention.config import (
    AttentionConfig,
    AttentionImplementation,
    from_json,
    to_json,
)
from pallas_kernels._common.device import Device
from pallas_kernels._common.tuned import find_text, own_or_borrowed
from pallas_kernels._common.tuned import write as write

PREFIX = "attention_"  # of a file in the user's folder, beside the products' table


@dataclasses.dataclass(frozen=True)
class AttentionEntry:
    """The winner for `q[b, t, hq, d]`, `k[b, s, hk, d]`, `group` heads, `sparsity` skipped.

    `config` is that of the fastest kernel, also where dense is faster.
    """

    op: str
    dtype: str
    b: int
    t: int
    s: int
    hq: int
    hk: int
    d: int
    group: int
    sparsity: float
    implementation: AttentionImplementation
    config: AttentionConfig
    ms: float | None = None
    dense_ms: float | None = None

    @property
    def key(self) -> tuple:
        """What identifies the problem (not its winner)."""
        shape = (self.b, self.t, self.s, self.hq, self.hk, self.d, self.group)
        return (self.op, self.dtype, *shape, self.sparsity)


@dataclasses.dataclass(frozen=True)
class AttentionTable:
    """All entries of one device kind. `model` says how an unmeasured table was derived."""

    device_kind: str
    capability: str
    measured: bool
    entries: tuple[AttentionEntry, ...]
    model: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the table; `read` reads it back."""
        entries = [
            {**dataclasses.asdict(entry), "config": to_json(entry.config)}
            for entry in sorted(self.entries, key=lambda e: e.key)
        ]
        return {**dataclasses.asdict(self), "entries": entries}


def read(text: str) -> AttentionTable:
    """A table from its JSON text. Raises `ValueError` where it is not one."""
    data = json.loads(text)
    entries = []
    for item in data.pop("entries"):
        config = from_json(item.pop("config"))
        entries.append(AttentionEntry(**item, config=config))
    return AttentionTable(entries=tuple(entries), **data)


@functools.cache
def load(device_kind: str) -> AttentionTable | None:
    """The table of a device kind: the user's own, else the package's, else None."""
    text = find_text(device_kind, "pallas_kernels._attention.tuned", PREFIX)
    return None if text is None else read(text)


def table_for(device: Device) -> tuple[AttentionTable, bool] | None:
    """The table to use for a device: see `own_or_borrowed`."""
    return own_or_borrowed(device, load)
