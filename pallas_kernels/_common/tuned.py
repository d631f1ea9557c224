"""The checked-in tables: which implementation and tile sizes were fastest, by device kind.

One JSON file a device kind in `pallas_kernels/tuned/`. A table that was not measured on its
device says so (`"measured": false`) and names the model it was derived from.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable
from importlib import resources
from typing import Any, Protocol, runtime_checkable

from pallas_kernels._common.config import Config, Implementation, from_json, to_json
from pallas_kernels._common.device import TABLE_FOR_CAPABILITY, Device

# A folder of tables that come before the package's own: where `wide tune` writes.
USER_TABLES = "WIDE_TUNED_DIR"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The winner for one shape: `x[m, k]`, `w[n, k]`, `group` channels, `sparsity` skipped."""

    op: str
    dtype: str
    m: int
    n: int
    k: int
    group: int
    sparsity: float
    implementation: Implementation
    config: Config | None
    ms: float | None = None
    dense_ms: float | None = None

    @property
    def key(self) -> tuple:
        """What identifies the problem (not its winner)."""
        return (self.op, self.dtype, self.m, self.n, self.k, self.group, self.sparsity)


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
        entries = []
        for entry in sorted(self.entries, key=lambda e: e.key):
            config = None if entry.config is None else to_json(entry.config)
            entries.append({**dataclasses.asdict(entry), "config": config})
        return {
            "device_kind": self.device_kind,
            "capability": self.capability,
            "measured": self.measured,
            "model": self.model,
            "versions": self.versions,
            "entries": entries,
        }


def read(text: str) -> Table:
    """A table from its JSON text. Raises `ValueError` where it is not one."""
    data = json.loads(text)
    entries = []
    for item in data.pop("entries"):
        config = item.pop("config")
        entries.append(Entry(**item, config=None if config is None else from_json(config)))
    return Table(entries=tuple(entries), **data)


@runtime_checkable
class Written(Protocol):
    """A table that can be written: `to_json()["entries"]` is a list of objects."""

    def to_json(self) -> dict[str, Any]:
        """The table's JSON object."""
        ...


def write(table: Written, path: pathlib.Path) -> None:
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


def find_text(device_kind: str, package: str, prefix: str = "") -> str | None:
    """The JSON text of a device kind's table: the user's own, else the package's, else None.

    `prefix` tells a kind of table from others in the user's folder.
    """
    name = file_name(device_kind)
    user = os.environ.get(USER_TABLES)
    if user and (path := pathlib.Path(user) / (prefix + name)).is_file():
        return path.read_text()
    resource = resources.files(package) / name
    return resource.read_text() if resource.is_file() else None


def own_or_borrowed[Found](
    device: Device, load: Callable[[str], Found | None]
) -> tuple[Found, bool] | None:
    """The table to use for a device, and whether it is that very device kind's own.

    A card without a table borrows that of its capability's measured or modelled class.
    """
    if (own := load(device.kind)) is not None:
        return own, True
    borrowed = TABLE_FOR_CAPABILITY.get(device.capability or "")
    table = None if borrowed is None else load(borrowed)
    return None if table is None else (table, False)


@functools.cache
def load(device_kind: str) -> Table | None:
    """The products' table of a device kind: the user's own, else the package's, else None."""
    text = find_text(device_kind, "pallas_kernels.tuned")
    return None if text is None else read(text)


def table_for(device: Device) -> tuple[Table, bool] | None:
    """The products' table to use for a device: see `own_or_borrowed`."""
    return own_or_borrowed(device, load)
