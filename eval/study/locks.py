"""What one process of the study does at a time, by locks of files: a killed process holds none."""

import fcntl
import os
import time
from pathlib import Path

PAUSE = 0.1  # seconds between looks at whose turn it is


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

    def try_hold(self) -> bool:
        """Whether it is held now, without waiting."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let another process have it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)


class Turn:
    """A lock that, of all who wait when it is free, one of the lowest wave gets."""

    def __init__(self, folder: Path, name: str, wave: int):
        self._folder, self._name, self._wave = folder, name, wave
        self._lock, self._held = Lock(folder, name), False

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def hold(self) -> None:
        """Wait for the turn; held already: at once."""
        if self._held:
            return
        # Who waits holds a lock of its own, so that a killed process waits no longer.
        place = f"{self._name}.{self._wave}.{os.getpid()}.{id(self)}"
        with Lock(self._folder, place) as waiting:
            waiting.hold()
            while self._others_first() or not self._lock.try_hold():
                time.sleep(PAUSE)
            (self._folder / place).unlink()
        self._held = True

    def release(self) -> None:
        """Let another process have it."""
        self._lock.release()
        self._held = False

    def _others_first(self) -> bool:
        for path in self._folder.glob(f"{self._name}.*"):
            if int(path.name.split(".")[1]) < self._wave:
                with Lock(self._folder, path.name) as other:
                    if not other.try_hold():
                        return True
        return False
