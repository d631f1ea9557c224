"""The checked-in tables: which implementation and tile sizes were fastest, by device kind.

One JSON file a device kind in `pallas_kernels/tuned/`. A table that was not measured on its
device says so (`"measured": false`) and names the model it was derived from.
"""

import dataclasses
import functools
import json
import os
import pathlib
from importlib import resources
from typing import Any

from pallas_kernels._common.device import TABLE_FOR_CAPABILITY, Device
from pallas_kernels._common.problem import AnyImplementation, Call, facts

# A folder of tables that come before the package's own: where `wide tune` writes.
USER_TABLES = "WIDE_TUNED_DIR"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The winner for one problem, whose `expected_sparsity` is the fraction that was skipped.

    `config` is that of the fastest kernel, also where dense is faster; None: no kernel ran.
    """

    problem: Call
    implementation: AnyImplementation
    config: Any
    ms: float | None = None
    dense_ms: float | None = None

    def __post_init__(self):
        if self.implementation != "dense" and self.config is None:
            raise ValueError(f"{self.problem}: {self.implementation} won, but with what config?")

    @property
    def op(self) -> str:
        """The op."""
        return self.problem.op

    @property
    def sparsity(self) -> float:
        """The fraction of (token, group) pairs that was skipped."""
        return self.problem.sparsity

    @property
    def key(self) -> tuple:
        """What identifies the problem (not its winner)."""
        p = self.problem
        return (p.op, p.dtype, *p.shape.values(), p.sparsity)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the entry; `read_entry` reads it back."""
        p, config = self.problem, self.config
        config = None if config is None else facts(p.op).config_to_json(config)
        fields = {"op": p.op, "dtype": p.dtype, **p.shape, "sparsity": p.sparsity}
        won = {"implementation": self.implementation, "config": config}
        return {**fields, **won, "ms": self.ms, "dense_ms": self.dense_ms}


def read_entry(data: dict[str, Any]) -> Entry:
    """An entry from its JSON object. Raises `ValueError` where it is not one."""
    fields = dict(data)
    op = facts(fields["op"])
    config = fields.pop("config")
    won = {name: fields.pop(name) for name in ("implementation", "ms", "dense_ms")}
    problem = op.problem(expected_sparsity=fields.pop("sparsity"), **fields)
    return Entry(problem, config=config and op.config_from_json(config), **won)


@dataclasses.dataclass(frozen=True)
class Table:
    """All entries of one device kind. `model` says how an unmeasured table was derived."""

    device_kind: str
    capability: str
    measured: bool
    entries: tuple[Entry, ...]
    model: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the table; `read` reads it back."""
        head = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        ordered = sorted(self.entries, key=lambda e: e.key)
        return {**head, "entries": [entry.to_json() for entry in ordered]}


def read(text: str) -> Table:
    """A table from its JSON text. Raises `ValueError` where it is not one."""
    data = json.loads(text)
    return Table(entries=tuple(map(read_entry, data.pop("entries"))), **data)


def write(table: Table, path: pathlib.Path) -> None:
    """Write a table, one entry a line, replacing the file in one step."""
    data = table.to_json()
    entries = data.pop("entries")
    head = json.dumps(data, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    text = f'{head},\n "entries": [\n{lines}\n ]\n}}\n'
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def file_name(device_kind: str) -> str:
    """`"NVIDIA H200"` -> `"nvidia_h200.json"`."""
    return device_kind.lower().replace(" ", "_").replace("/", "_") + ".json"


@functools.cache
def load(device_kind: str) -> Table | None:
    """The table of a device kind: the user's own, with the package's entries of its other ops.

    None where there is neither.
    """
    name = file_name(device_kind)
    resource = resources.files("pallas_kernels.tuned") / name
    package = read(resource.read_text()) if resource.is_file() else None
    user = os.environ.get(USER_TABLES)
    if not user or not (path := pathlib.Path(user) / name).is_file():
        return package
    own = read(path.read_text())
    ops = {entry.op for entry in own.entries}
    others = () if package is None else package.entries
    entries = (*own.entries, *(entry for entry in others if entry.op not in ops))
    return dataclasses.replace(own, entries=entries)


def table_for(device: Device) -> tuple[Table, bool] | None:
    """The table to use for a device, and whether it is that very device kind's own.

    A card without a table borrows that of its capability's measured or modelled class.
    """
    if (own := load(device.kind)) is not None:
        return own, True
    borrowed = TABLE_FOR_CAPABILITY.get(device.capability or "")
    table = None if borrowed is None else load(borrowed)
    return None if table is None else (table, False)
