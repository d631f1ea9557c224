"""What runs inside the sandbox's interpreter: limits, then the guard, then the program.

Started by `eval.sandbox.run` as a script, with one JSON object on its standard input.
"""

import json
import os
import resource
import sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READABLE = ("/usr/share/zoneinfo/", "/etc/localtime", "/dev/urandom", "/dev/null")
# fmt: off
REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.kill", "pty.", "ctypes.", "mmap.", "syslog.", "signal.pthread_kill", "os.chown",
    "os.chmod", "os.setxattr", "os.unshare", "ftplib.", "http.", "urllib.", "smtplib.",
    "webbrowser.", "sqlite3.", "resource.", "_posixsubprocess.",
)
CHANGES = (  # allowed inside the program's own folder only
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.utime", "os.chdir", "shutil.", "tempfile.",
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


def guard_of(home: str):
    """An audit hook (they cannot be removed) that raises PermissionError at what is refused."""
    roots = (*sys.path, sys.base_prefix)
    readable = READABLE + tuple(os.path.realpath(root) + os.sep for root in roots if root)

    def inside(path) -> bool:
        return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(home)

    def guard(event, args) -> None:
        if event == "open":
            path, mode, flags = args
            if isinstance(path, int) or inside(path):
                return
            writes = bool((flags or 0) & WRITES) or any(c in (mode or "") for c in "wax+")
            if writes or not os.path.realpath(os.fsdecode(path)).startswith(readable):
                raise PermissionError(f"sandbox: open {path!r}")
        elif event.startswith(REFUSED):
            raise PermissionError(f"sandbox: {event}")
        elif event.startswith(CHANGES):
            paths = [arg for arg in args if isinstance(arg, str | bytes | os.PathLike)]
            if not all(map(inside, paths)):
                raise PermissionError(f"sandbox: {event}")

    return guard


def main() -> None:
    """Read the job, confine this process, run the program, and print the token at its end."""
    job = json.load(sys.stdin)
    limit(resource.RLIMIT_CPU, job["cpu_seconds"])
    limit(resource.RLIMIT_AS, job["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, job["file_bytes"])
    limit(resource.RLIMIT_NOFILE, job["open_files"])
    limit(resource.RLIMIT_CORE, 0)
    leave_network()
    code = compile(job["program"], "program.py", "exec")
    sys.addaudithook(guard_of(os.path.realpath(os.getcwd()) + os.sep))
    exec(code, {"__name__": "__main__"})
    print(job["token"])


main()
