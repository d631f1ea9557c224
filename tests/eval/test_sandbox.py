"""The sandbox: honest programs pass, and network, processes, files, memory and time are refused."""

import sys
import time
import tracemalloc

import pytest

from eval.sandbox import Limits, run


@pytest.mark.parametrize(
    "program",
    [
        "assert sorted([2, 1]) == [1, 2]",
        "import math, re, collections, itertools, heapq, datetime\nassert math.gcd(4, 6) == 2",
        "open('mine.txt', 'w').write('x')\nassert open('mine.txt').read() == 'x'",
        "print('talks')\nimport sys\nsys.stdout.write('no newline')",
        "import random, string, functools, json, decimal, fractions, bisect, statistics, copy",
    ],
)
def test_honest_programs_pass(program):
    verdict = run(program)
    assert verdict.outcome == "passed", verdict


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(0)", "code 0"),  # an early end is no pass
        ("import os\nos._exit(0)", "code 0"),
        ("import socket\nsocket.socket()", "sandbox: socket"),
        ("import urllib.request as u\nu.urlopen('http://127.0.0.1:9')", "sandbox"),
        ("import subprocess\nsubprocess.run(['true'])", "sandbox: subprocess.Popen"),
        ("import os\nos.system('true')", "sandbox: os.system"),
        ("import os\nos.fork()", "sandbox: os.fork"),
        ("import ctypes", "sandbox"),
        ("open('/etc/passwd').read()", "sandbox: open '/etc/passwd'"),
        ("open('/tmp/escaped-from-sandbox', 'w')", "sandbox: open"),
        ("open('../escaped-from-sandbox', 'w')", "sandbox: open"),
        ("import os\nos.remove('/tmp/anything')", "sandbox: os.remove"),
        ("import os\nos.mkdir('/tmp/escaped-folder')", "sandbox: os.mkdir"),
        ("import os\nos.kill(os.getppid(), 0)", "sandbox: os.kill"),
        ("import resource as r\nr.setrlimit(r.RLIMIT_CPU, (9, 9))", "sandbox: resource"),
        ("x = bytearray(2 ** 31)", "MemoryError"),
        ("f = open('big', 'wb')\nf.write(bytes(2 ** 22))\nf.close()", "File too large"),
        ("for i in range(99):\n    open(f'{i}', 'w').close()", "sandbox: more than 64 files"),
        ("import os\nos.listdir('/')", "sandbox: os.listdir '/'"),
        ("import os\nos.scandir('..')", "sandbox: os.scandir '..'"),
        ("import os\nos.mkfifo('/tmp/escaped-pipe')", "sandbox: mkfifo"),
        ("import os\nos.pidfd_open(os.getppid())", "sandbox: pidfd_open"),
        ("import _posixsubprocess as p\np.fork_exec()", "sandbox: fork_exec"),
        ("import sys\ndel sys.modules['posix']\nimport posix", "sandbox: import posix"),
        ("import multiprocessing.synchronize", "sandbox: import _multiprocessing"),
        ("import sys\nwhile True:\n    sys.stderr.write(99999 * 'x')", "x"),
        ("import os\nassert os.environ.get('HOME') is None\nassert 0, list(os.environ)", "['"),
    ],
)
def test_everything_else_fails_and_says_why(program, detail):
    verdict = run(program)
    assert verdict.outcome == "failed", verdict
    assert detail in verdict.detail


def test_a_program_without_end_is_stopped():
    start = time.monotonic()
    assert run("while True: pass", Limits(seconds=1.0)).outcome == "timeout"
    assert run("import time\ntime.sleep(60)", Limits(seconds=0.5)).outcome == "timeout"
    assert time.monotonic() - start < 10


def test_what_a_program_prints_is_kept_nowhere():
    assert run("for _ in range(10_000): print(10_000 * 'x')").outcome == "passed"  # 100 MB
    endless = "while True: print(1_000_000 * 'x')"
    tracemalloc.start()
    try:
        assert run(endless, Limits(seconds=1.0)).outcome == "timeout"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="its name is another since")
def test_a_second_interpreter_would_have_no_guard():
    verdict = run("import _xxsubinterpreters as s\ns.run_string(s.create(), 'open(1)')")
    assert (verdict.outcome, "sandbox: import" in verdict.detail) == ("failed", True)


def test_printing_another_programs_end_is_no_pass():
    assert run("print('0' * 32)\nraise SystemExit(0)").outcome == "failed"
