"""Files a command writes: checked before the long work, written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from wide_jax.hf.save import umask


def check_writable_file(path: Path) -> None:
    """Raise OSError now if `write_json` could not write `path` later."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.absolute().parent}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise PermissionError(f"{path}: the folder {path.absolute().parent} cannot be written")


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that `path` holds the old content or the new, never a part."""
    folder = path.absolute().parent
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    os.chmod(file.name, 0o666 & ~umask())
    os.replace(file.name, path)
