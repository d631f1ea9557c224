"""Progress in a log: what is left is told from what this process did."""

import io

import pytest
from rich.console import Console

from wide_jax.cli import progress as module
from wide_jax.cli.progress import Stages, progress


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def printed(console):
    return console.file.getvalue().splitlines()


def test_the_time_left_is_that_of_work_that_goes_on(console, monkeypatch):
    now = iter([0.0, 10.0, 30.0, 50.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with progress(console, "training") as advance:
        advance(5000, 6000, "")  # resumed: nothing is known yet
        advance(5100, 6000, "b")  # 20 s for 100 of them
        advance(6000, 6000, "c")
    assert printed(console) == [
        "training ...",
        "training: 85% (30 s, ETA 180 s) b",
        "training: 100% (50 s) c",
    ]


def test_a_whole_that_is_not_known_has_no_share(console, monkeypatch):
    now = iter([0.0, 1.0, 20.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with progress(console, "tokenising") as advance:
        advance(1, None, "1 document")
        advance(9, None, "9 documents")
    assert printed(console) == ["tokenising ...", "tokenising: (20 s) 9 documents"]


def test_stages_follow_each_other(console):
    stages = Stages(console)
    stages.advance("one", 1, 2)
    stages.advance("one", 2, 2)
    stages.advance("two", 1, 1, "done")
    stages.close()
    lines = printed(console)
    assert [line.partition("(")[0] for line in lines] == [
        "one ...", "one: 100% ", "two ...", "two: 100% ",
    ]  # fmt: skip


def test_on_a_terminal_one_bar_is_alive_at_a_time():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    stages = Stages(terminal)
    stages.advance("one", 1, None, "a note")
    stages.advance("two", 1, 2)  # a second live display would raise
    stages.close()
    assert "two" in terminal.file.getvalue()
