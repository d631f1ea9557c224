"""Progress of long work: a bar with an ETA on a terminal, a line now and then in a log."""

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int, int, str], None]  # done, in all, a short note

SECONDS_BETWEEN_LINES = 15.0


@contextlib.contextmanager
def progress(console: Console, description: str) -> Generator[Advance]:
    """Yield a function `advance(done, total, note)` that shows how far the work is."""
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
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=None, note="")

        def advance(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield advance


def advance_bytes(advance: Callable[[int, int, str], None]) -> Callable[[int, int], None]:
    """A progress callback for bytes done and in all, noted in MB."""
    return lambda done, total: advance(done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")


def _lines(console: Console, description: str) -> Advance:
    """A line at the start, then at most one every few seconds, and one at the end."""
    begun = last = time.monotonic()
    console.print(f"{description} ...")

    def advance(done: int, total: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        elapsed = now - begun
        left = elapsed / done * (total - done) if done else float("nan")
        when = f"{elapsed:.0f} s" if done >= total else f"{elapsed:.0f} s, ETA {left:.0f} s"
        console.print(
            f"{description}: {done / total:.0%} ({when}) {note}", highlight=False, soft_wrap=True
        )

    return advance
