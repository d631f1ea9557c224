"""Progress of long work: a bar with an ETA on a terminal, a line now and then in a log."""

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# done, in all (None: not known), a short note
Advance = Callable[[int, int | None, str], None]

SECONDS_BETWEEN_LINES = 15.0


@contextlib.contextmanager
def progress(console: Console, description: str, *, transient: bool = False) -> Generator[Advance]:
    """Yield a function `advance(done, total, note)` that shows how far the work is.

    `transient`: the bar goes away at the end, for work that is often done at once.
    """
    if not console.is_terminal:
        yield _lines(console, description)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[note]}[/dim]"),
    )
    with Progress(*columns, console=console, transient=transient) as bar:
        task = bar.add_task(description, total=None, note="")

        def advance(done: int, total: int | None, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield advance


def advance_bytes(advance: Callable[[int, int, str], None]) -> Callable[[int, int], None]:
    """A progress callback for bytes done and in all, noted in MB."""
    return lambda done, total: advance(done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")


class Stages:
    """One bar after the other, for work whose parts announce themselves; close it at the end."""

    def __init__(self, console: Console):
        self._console = console
        self._stack = contextlib.ExitStack()
        self._shown: str | None = None
        self._advance: Advance = lambda done, total, note: None

    def advance(self, description: str, done: int, total: int | None, note: str = "") -> None:
        """Show how far a part is; another description ends the part before."""
        if description != self._shown:
            self.close()
            self._advance = self._stack.enter_context(progress(self._console, description))
            self._shown = description
        self._advance(done, total, note)

    def close(self) -> None:
        """End the bar that is shown."""
        self._stack.close()
        self._shown = None


def _lines(console: Console, description: str) -> Advance:
    """A line at the start, then at most one every few seconds, and one at the end."""
    begun = last = time.monotonic()
    start: tuple[float, int] | None = None  # work that goes on does not begin at 0
    console.print(f"{description} ...")

    def advance(done: int, total: int | None, note: str = "") -> None:
        nonlocal last, start
        now = time.monotonic()
        if start is None:
            start = now, done
        if done != total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        when = f"{now - begun:.0f} s"
        if total is not None and start[1] < done < total:
            left = (now - start[0]) / (done - start[1]) * (total - done)
            when += f", ETA {left:.0f} s"
        share = "" if total is None else f"{done / total:.0%} "
        console.print(f"{description}: {share}({when}) {note}", highlight=False, soft_wrap=True)

    return advance
