"""What one process of the study does at a time, by locks of files: a killed process holds none."""

import fcntl
from pathlib import Path


class Lock:
    """A lock by name in a folder. Leaving its block, by whatever way, releases it."""

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / name).open("w")

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def hold(self) -> None:
        """Wait until no other process holds it; held already: at once."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let another process have it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
