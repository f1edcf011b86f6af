"""What a forked child of the fork server does: give up its rights, then become the untrusted program.

Everything before `exec_program` and `exec_code` is trusted code in a process that still has the server's
rights. Standard library only, and little of it: what a child touches first costs it a page fault.
"""

from __future__ import annotations

import atexit
import ctypes
import linecache
import math
import os
import resource
import signal
import sys
import traceback
import types
from typing import Any, NoReturn

KEPT_FDS = 500
"""Descriptors from here on stay open in a child: the standard library's folders."""

PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

_libc = ctypes.CDLL(None)  # opened once: opening it in each child costs more than the fork


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(_PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root


def stdlib_through_fds() -> None:
    """Reach the standard library through open folders.

    Where root's Python lies under /root (uv, pyenv), an ordinary user may read the library but not
    walk to it; /proc/self/fd/N of a folder opened now leads there.
    """
    moved: dict[str, str] = {}
    for path in [p for p in sys.path if os.path.isdir(p)]:
        at = os.open(path, os.O_PATH | os.O_DIRECTORY)
        fd = KEPT_FDS + len(moved)
        os.dup2(at, fd, inheritable=False)
        os.close(at)
        moved[path] = f"/proc/self/fd/{fd}"
    sys.path[:] = list(moved.values())
    for module in list(sys.modules.values()):
        old = module.__dict__.get("__path__")
        if isinstance(old, list):
            for path in sorted(moved, key=len, reverse=True):
                old[:] = [p.replace(path, moved[path], 1) if p.startswith(path) else p for p in old]


def confine(meta: dict[str, Any], spare_processes: int) -> None:
    """Give up rights, in the child, before any untrusted code: limits, uid, folder, no way back."""
    timeout_s, cpu_s, memory, _, file_bytes, processes = meta["limits"]
    seconds = math.ceil(cpu_s) + 1  # the coarse kernel limit stands behind the precise timer
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
        (resource.RLIMIT_NPROC, processes + spare_processes, processes + spare_processes),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(kind)[1]
        ceiling = hard if ceiling == resource.RLIM_INFINITY else ceiling
        resource.setrlimit(kind, (min(soft, ceiling), min(hard, ceiling)))
    if meta["uid"] is not None:
        become(meta["uid"])
    os.umask(0o077)
    os.chdir(meta["folder"])
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, min(cpu_s, timeout_s))


def exec_program(meta: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    environment = {**os.environ, "HOME": meta["folder"], "TMPDIR": meta["folder"], **meta["env"]}
    try:
        os.execvpe(meta["argv"][0], meta["argv"], environment)
    except OSError as error:
        os.write(2, f"{meta['argv'][0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 255
    sys.stderr.write(f"{value}\n")
    return 1


def exec_code(code: str | types.CodeType, folder: str) -> NoReturn:
    """Run the code as a fresh `__main__`, print its traceback as Python would, exit."""
    os.environ.update(HOME=folder, TMPDIR=folder)
    sys.argv = ["main.py"]
    sys.path.insert(0, folder)
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__="main.py")
    sys.modules["__main__"] = module
    status = 0
    try:
        if isinstance(code, str):
            linecache.cache["main.py"] = (len(code), None, code.splitlines(keepends=True), "main.py")
            code = compile(code, "main.py", "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as error:
        status = _exit_code(error.code)
    except BaseException as error:
        frames = error.__traceback__
        traceback.print_exception(type(error), error, frames.tb_next if frames else None)
        status = 1
    try:
        if (threading := sys.modules.get("threading")) is not None:
            threading.__dict__["_shutdown"]()
        atexit.__dict__["_run_exitfuncs"]()
        sys.stdout.flush()
    except BaseException:
        status = status or 120
    os._exit(status)
