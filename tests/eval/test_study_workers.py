"""Workers: processes that do jobs one after another, each kind its own."""

import os
import sys
import time

import pytest

from eval.study.plan import Recipe, plan
from eval.study.schedule import Job
from eval.study.workers import Workers

ROWS = {row.id: row for row in plan(Recipe(updates=2, group=8, groups=(16,), heads=2))}
FINE, COARSE = "wide-g8-h2-separate-50-s1-u2", "wide-g16-h2-separate-50-s1-u2"
# Says in each job's log which process does it; jobs of the dense row fail, and one kills itself.
WORK = """
import os, sys
print("said while it was imported", flush=True)
from eval.study.workers import serve

def work(name, rehearsal):
    print(os.getpid(), name, rehearsal, flush=True)
    os.system("echo from a child")
    if name == "dense.tasks":
        raise ValueError("no such task")
    if name == "dense.perplexity":
        os.kill(os.getpid(), 9)

serve(work, int(sys.argv[1]))
"""


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def workers(logs):
    with Workers([sys.executable, "-c", WORK], logs, most=3) as workers:
        yield workers


def job(name, part):
    return Job(ROWS[name], part)


def ended(given):
    deadline = time.monotonic() + 60
    while (code := given.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def process(logs, name):
    lines = (logs / f"{name}.log").read_text().splitlines()
    job = name.removesuffix(".rehearsal")
    return next(int(line.split()[0]) for line in lines if line.split()[1] == job)


def alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_jobs_of_a_kind_share_a_process_and_have_a_log_each(workers, logs):
    for name, part in ((FINE, "errors"), (COARSE, "tasks"), (FINE, "model")):
        assert ended(workers.start(job(name, part), False)) == 0
    text = (logs / f"{FINE}.errors.log").read_text()
    assert text.splitlines()[0] == "said while it was imported"
    assert text.splitlines()[1].endswith(f"{FINE}.errors False")
    assert "from a child" in text
    first = process(logs, f"{FINE}.errors")
    assert process(logs, f"{COARSE}.tasks") == first
    assert process(logs, f"{FINE}.model") != first


def test_a_rehearsal_is_a_kind_of_its_own(workers, logs):
    assert ended(workers.start(job(FINE, "model"), False)) == 0
    assert ended(workers.start(job(FINE, "model"), True)) == 0
    rehearsed = (logs / f"{FINE}.model.rehearsal.log").read_text()
    assert rehearsed.splitlines()[1].endswith(" True")
    assert process(logs, f"{FINE}.model.rehearsal") != process(logs, f"{FINE}.model")


def test_a_job_goes_to_a_process_that_knows_its_structure(workers, logs):
    both = [workers.start(job(name, "errors"), False) for name in (FINE, COARSE)]
    assert [ended(given) for given in both] == [0, 0]
    for name in (COARSE, FINE):
        assert ended(workers.start(job(name, "tasks"), False)) == 0
        assert process(logs, f"{name}.tasks") == process(logs, f"{name}.errors")


@pytest.mark.parametrize("part", ["tasks", "perplexity"])
def test_a_failed_job_is_its_processs_last(workers, logs, part):
    assert ended(workers.start(job("dense", part), False)) != 0
    if part == "tasks":
        assert "no such task" in (logs / "dense.tasks.log").read_text()
    assert ended(workers.start(job(FINE, "errors"), False)) == 0
    assert process(logs, f"{FINE}.errors") != process(logs, f"dense.{part}")


def test_idle_processes_make_room_for_another_kind(logs):
    with Workers([sys.executable, "-c", WORK], logs, most=1) as workers:
        assert ended(workers.start(job(FINE, "errors"), False)) == 0
        first = process(logs, f"{FINE}.errors")
        assert alive(first)
        assert ended(workers.start(job(FINE, "model"), False)) == 0
        assert not alive(first)
        last = process(logs, f"{FINE}.model")
    assert not alive(last)  # and none is left at the end


def test_what_is_measured_alone_finds_the_device_free(workers, logs):
    given = [workers.start(job(FINE, part), False) for part in ("errors", "model")]
    assert [ended(one) for one in given] == [0, 0]
    assert ended(workers.start(job(FINE, "speed"), False)) == 0
    assert not any(alive(process(logs, f"{FINE}.{part}")) for part in ("errors", "model"))


def test_a_process_that_takes_long_to_end_keeps_nobody_waiting(logs):
    slow = WORK.replace(
        "serve(work, int(sys.argv[1]))",
        """
import time, traceback
try:
    serve(work, int(sys.argv[1]))
except ValueError:
    traceback.print_exc()
    os.close(int(sys.argv[1]))
    time.sleep(20)
    raise
""",
    )
    with Workers([sys.executable, "-c", slow], logs, most=2) as workers:
        failing = workers.start(job("dense", "tasks"), False)
        log = logs / "dense.tasks.log"
        deadline = time.monotonic() + 60
        while "no such task" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = time.monotonic()
        assert failing.poll() is None  # it has failed, and its process lives on for 20 s
        assert ended(workers.start(job(FINE, "model"), False)) == 0
        assert failing.poll() is None
        assert time.monotonic() < before + 20
        failing.terminate()
        assert ended(failing) != 0


def test_what_a_process_says_before_its_first_job_is_in_that_jobs_log(logs):
    with Workers([sys.executable, "-c", "raise SystemExit('no such library')"], logs, 1) as workers:
        assert ended(workers.start(job(FINE, "errors"), False)) != 0
    assert "no such library" in (logs / f"{FINE}.errors.log").read_text()


def test_ending_a_job_ends_its_process(workers):
    given = workers.start(job(FINE, "errors"), False)
    given.terminate()
    assert given.wait(timeout=60.0) != 0
