"""What runs inside the sandbox's interpreter: limits, then the guard, then the program.

Started by `eval.sandbox.run` as a script, with one JSON object on its standard input.
"""

import importlib
import json
import os
import resource
import sys
from collections.abc import Callable

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READABLE = ("/usr/share/zoneinfo/", "/etc/localtime", "/dev/urandom", "/dev/null")
# fmt: off
REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.kill", "pty.", "ctypes.", "mmap.", "syslog.", "signal.pthread_kill", "os.chown",
    "os.chmod", "os.setxattr", "ftplib.", "http.", "urllib.", "smtplib.", "webbrowser.",
    "sqlite3.", "resource.",
)
CHANGES = (  # allowed inside the program's own folder only
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.utime", "os.chdir", "shutil.", "tempfile.",
)
UNSEEN = {  # these raise no audit event, so they are taken away
    ("posix", "os"): (
        "chroot", "mkfifo", "mknod", "openpty", "pidfd_open", "posix_openpt", "setns", "unshare",
    ),
    ("_signal", "signal"): ("pidfd_send_signal",),
    ("_posixsubprocess",): ("fork_exec",),
}
MODULES = (  # no honest program needs them; an interpreter of its own would have no guard
    "_interpreters", "_xxsubinterpreters", "_multiprocessing", "_posixshmem", "_testcapi",
    "_testinternalcapi", *(name for names in UNSEEN for name in names),  # or: a second time
)
# fmt: on


def limit(name: int, value: int) -> None:
    """Set both limits, never above what is allowed already."""
    _, hard = resource.getrlimit(name)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(name, (value, value))


def leave_network() -> None:
    """Go where no network device is, if the system lets an ordinary user do so."""
    try:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    except (AttributeError, OSError):
        return  # the guard refuses sockets in any case


def refuse(name: str) -> Callable[..., None]:
    """What stands in the place of a function that is taken away."""

    def refused(*args, **kwargs):
        raise PermissionError(f"sandbox: {name}")

    return refused


def take_away() -> None:
    """Leave no way to what the guard would not see."""
    for modules, names in UNSEEN.items():
        for module in map(importlib.import_module, modules):
            for name in names:
                setattr(module, name, refuse(name))


def guard_of(home: str, files: int):
    """An audit hook (they cannot be removed) that raises PermissionError at what is refused."""
    roots = (*sys.path, sys.base_prefix)
    readable = READABLE + tuple(os.path.realpath(root) + os.sep for root in roots if root)
    made = 0

    def resolve(path) -> str:
        return os.path.realpath(os.fsdecode(path)) + os.sep

    def inside(path) -> bool:
        return resolve(path).startswith(home)

    def count() -> None:
        nonlocal made
        made += 1
        if made > files:
            raise PermissionError(f"sandbox: more than {files} files")

    def guard(event, args) -> None:
        if event == "open":
            path, mode, flags = args
            if isinstance(path, int):
                return
            writes = bool((flags or 0) & WRITES) or any(c in (mode or "") for c in "wax+")
            if inside(path):
                if writes:
                    count()
            elif writes or not resolve(path).startswith(readable):
                raise PermissionError(f"sandbox: open {path!r}")
        elif event in ("os.listdir", "os.scandir"):
            path = "." if args[0] is None else args[0]
            if not isinstance(path, int) and not resolve(path).startswith((home, *readable)):
                raise PermissionError(f"sandbox: {event} {path!r}")
        elif event == "import":
            if args[0] in MODULES:
                raise PermissionError(f"sandbox: import {args[0]}")
        elif event.startswith(REFUSED):
            raise PermissionError(f"sandbox: {event}")
        elif event.startswith(CHANGES):
            paths = [arg for arg in args if isinstance(arg, str | bytes | os.PathLike)]
            if not all(map(inside, paths)):
                raise PermissionError(f"sandbox: {event}")
            if event in ("os.mkdir", "os.link", "os.symlink"):
                count()

    return guard


def main() -> None:
    """Read the job, confine this process, run the program, and write the token at its end.

    The token alone goes to standard output; what the program prints goes nowhere.
    """
    job = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    limit(resource.RLIMIT_CPU, job["cpu_seconds"])
    limit(resource.RLIMIT_AS, job["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, job["file_bytes"])
    limit(resource.RLIMIT_NOFILE, job["files"])
    limit(resource.RLIMIT_CORE, 0)
    leave_network()
    code = compile(job["program"], "program.py", "exec")
    take_away()
    sys.addaudithook(guard_of(os.path.realpath(os.getcwd()) + os.sep, job["files"]))
    exec(code, {"__name__": "__main__"})
    os.write(output, job["token"].encode())


main()
