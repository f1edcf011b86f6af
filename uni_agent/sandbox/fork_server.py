"""The fork server: one small, warm Python process that forks a child for each run of untrusted code.

Runs under `python -S -s -P -B -u` with a clean environment, on the standard library alone (`pool.py`
starts it, and is the other end of the socket). In: request frames (id, what to run, folder, uid, limits).
Out: one reply frame per request (wait status, why it was killed, output, usage). Clocks and clean-up live
here, so the owner only waits. Nothing here knows of tools, tasks, tests or event loops.

The server is the subreaper of what it forks: a process that leaves its run's session becomes the
server's child when its parent dies, and is killed; a reply is sent after the run's last process is gone.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import types
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from uni_agent.sandbox.child import (
    KEPT_FDS,
    PR_SET_CHILD_SUBREAPER,
    become,
    confine,
    exec_code,
    exec_program,
    prctl,
    stdlib_through_fds,
)
from uni_agent.sandbox.frames import FrameReader, pack_frame

FIRST_UID, NUM_UIDS = 60706, 478
"""Uids 60706..61183 are reserved and unused on systemd hosts, and mapped in most rootless containers."""

_MAX_FDS = 512
_DRAIN_S = 5.0


def _memory_file(name: str, content: bytes = b"") -> int:
    if sys.platform == "linux":
        fd = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _head_and_tail(fd: int, limit: int) -> tuple[bytes, int]:
    """At most `limit` bytes of a file, from both its ends, with a marker between; and its size."""
    size = os.fstat(fd).st_size
    if size <= limit:
        return os.pread(fd, size, 0), size
    head, tail = limit - limit // 2, limit // 2
    marker = f"\n... [{size - limit} bytes dropped] ...\n".encode()
    return os.pread(fd, head, 0) + marker + os.pread(fd, tail, size - tail), size


def _can_become_ordinary() -> str:
    """Try it in a child: "" when a run can have its own uid, else the reason why not."""
    if os.getuid() != 0:
        return "not started by root, so code runs as the user who started it"
    pid = os.fork()
    if pid == 0:
        try:
            become(FIRST_UID)
            for path in sys.path:
                if os.path.exists(path):
                    os.listdir(path)
        except BaseException:
            os._exit(1)
        os._exit(0 if any(os.path.isdir(path) for path in sys.path) else 1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        return "root here cannot become an ordinary user that reads Python's library, so code runs as root"
    return ""


def _tasks_of_user() -> int:
    """Threads that this user runs now: RLIMIT_NPROC counts all of them."""
    count, uid = 0, os.getuid()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += os.stat(f"/proc/{name}/task").st_nlink - 2
            except OSError:
                continue  # it has just ended
    return count


class _Run:
    """One live child, and what is known of it."""

    __slots__ = (
        "deadline",
        "err",
        "fault",
        "id",
        "out",
        "output_bytes",
        "reason",
        "started",
        "status",
        "usage",
    )

    def __init__(self, meta: dict[str, Any], out: int, err: int, fault: int) -> None:
        self.id: int = meta["id"]
        self.output_bytes: int = meta["limits"][3]
        self.started = time.monotonic()
        self.deadline: float = self.started + meta["limits"][0]
        self.out, self.err, self.fault = out, err, fault
        self.reason = ""
        self.status = 0
        self.usage: tuple[float, float, int] = (0.0, 0.0, 0)  # wall and cpu seconds, ru_maxrss


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing: SIGCHLD has only to write to the wake-up socket."""


class Server:
    """Serves one socket until it closes; then kills what is left."""

    def __init__(self, sock: socket.socket, max_concurrent: int, uid_reason: str) -> None:
        self._sock = sock
        self._max_concurrent = max_concurrent
        self._counts_user = bool(uid_reason)
        self._user_tasks, self._counted_at = 0, -math.inf
        self._live: dict[int, _Run] = {}
        self._ended: deque[_Run] = deque()
        self._waiting: deque[tuple[dict[str, Any], list[bytes]]] = deque()
        self._compiled: dict[bytes, types.CodeType] = {}
        self._null = os.open("/dev/null", os.O_RDONLY)
        self._children = f"/proc/self/task/{os.getpid()}/children"

    def trust(self, source: bytes) -> None:
        """Compile code of our own once, so that runs of it need not."""
        self._compiled[source] = compile(source, "harness.py", "exec", dont_inherit=True)

    def serve(self) -> None:
        """Answer requests until the owner closes the socket or dies."""
        wake, wake_write = socket.socketpair()
        for end in (wake, wake_write):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        reader, poll = FrameReader(), select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(wake, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll(self._patience_ms()):
                    if fd == wake.fileno():
                        wake.recv(4096)
                    elif data := self._sock.recv(1 << 16):
                        for meta, blobs in reader.feed(data):
                            self._take(meta, blobs)
                    else:
                        return
                self._expire()
                self._reap()
                while self._waiting and len(self._live) < self._max_concurrent:
                    self._start(*self._waiting.popleft())
        finally:
            self._kill_all()

    def _patience_ms(self) -> float | None:
        if self._ended:
            return 20
        if not self._live:
            return None
        nearest = min(run.deadline for run in self._live.values())
        return None if nearest == math.inf else max(0.0, nearest - time.monotonic()) * 1000 + 1

    def _take(self, meta: dict[str, Any], blobs: list[bytes]) -> None:
        if "cancel" not in meta:
            self._waiting.append((meta, blobs))
            return
        for pid, run in self._live.items():
            if run.id == meta["cancel"]:
                self._kill(pid, run, "cancelled")
                return
        for request in self._waiting:
            if request[0]["id"] == meta["cancel"]:
                self._waiting.remove(request)
                self._send({"id": meta["cancel"], "fault": "cancelled before it began"}, [])
                return

    def _spare_processes(self, meta: dict[str, Any]) -> int:
        """What RLIMIT_NPROC must allow beyond the run's own share: the user's other threads."""
        if meta["uid"] is not None or not self._counts_user:
            return 0
        if time.monotonic() - self._counted_at > 10:
            self._user_tasks, self._counted_at = _tasks_of_user() + 256, time.monotonic()
        return self._user_tasks

    def _start(self, meta: dict[str, Any], blobs: list[bytes]) -> None:
        spare = self._spare_processes(meta)
        stdin = _memory_file("stdin", blobs[1]) if blobs[1] else self._null
        out, err = _memory_file("stdout"), _memory_file("stderr")
        fault, fault_write = os.pipe()
        run = _Run(meta, out, err, fault)
        try:
            pid = os.fork()
        except OSError as error:
            self._send({"id": run.id, "fault": f"cannot fork: {error}"}, [])
            for fd in (out, err, fault):
                os.close(fd)
        else:
            if pid == 0:
                self._be_child(meta, blobs[0], (stdin, out, err, fault_write), spare)
            self._live[pid] = run
        os.close(fault_write)
        if stdin != self._null:
            os.close(stdin)

    def _be_child(
        self, meta: dict[str, Any], source: bytes, fds: tuple[int, int, int, int], spare: int
    ) -> NoReturn:
        try:
            os.setsid()
            fault = KEPT_FDS - 1
            os.dup2(fds[3], fault, inheritable=False)
            for target, fd in enumerate(fds[:3]):
                os.dup2(fd, target)
            os.closerange(3, fault)
            code = self._compiled.get(source) or source.decode("utf-8", "surrogatepass")
            self.__dict__.clear()  # what waits for other runs is none of this one's business
            confine(meta, spare)
        except BaseException as error:
            os.write(KEPT_FDS - 1, f"{type(error).__name__}: {error}".encode())
            os._exit(120)
        os.close(fault)
        if meta["argv"]:
            exec_program(meta)
        exec_code(code, meta["folder"])

    def _kill(self, pid: int, run: _Run, reason: str) -> None:
        run.reason = run.reason or reason
        run.deadline = math.inf
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except OSError:
                continue  # not yet a group leader, or already gone

    def _expire(self) -> None:
        now = time.monotonic()
        for pid, run in self._live.items():
            if run.deadline <= now:
                self._kill(pid, run, "timeout")

    def _reap(self) -> None:
        """Collect the dead, kill what they left behind, and answer once nothing is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            run = self._live.pop(pid, None)
            if run is not None:
                now = time.monotonic()
                run.status = status
                run.usage = (now - run.started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
                run.deadline = now + _DRAIN_S
                self._ended.append(run)
                try:
                    os.killpg(pid, signal.SIGKILL)
                except OSError:
                    continue  # nothing is left of its group
        if self._ended:
            clean = self._kill_strays() == 0
            while self._ended and (clean or self._ended[0].deadline <= time.monotonic()):
                self._answer(self._ended.popleft())

    def _kill_strays(self) -> int:
        """Kill children of ours that belong to no live run; return how many there were."""
        if sys.platform != "linux":
            return 0
        with open(self._children, "rb") as file:
            pids = [int(pid) for pid in file.read().split()]
        strays = 0
        for pid in pids:
            if pid in self._live:
                continue
            try:
                if os.getsid(pid) in self._live:
                    continue  # a background process of a run that goes on
                strays += 1
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it has just ended
        return strays

    def _answer(self, run: _Run) -> None:
        fault = os.read(run.fault, 4096).decode("utf-8", "replace")
        (out, out_size), (err, err_size) = (_head_and_tail(fd, run.output_bytes) for fd in (run.out, run.err))
        for fd in (run.out, run.err, run.fault):
            os.close(fd)
        wall_s, cpu_s, peak = run.usage
        self._send(
            {
                "id": run.id,
                "fault": fault,
                "status": run.status,
                "reason": run.reason,
                "out_size": out_size,
                "err_size": err_size,
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "peak_bytes": peak if sys.platform == "darwin" else peak * 1024,
            },
            [out, err],
        )

    def _send(self, meta: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self._sock.sendall(pack_frame(meta, blobs))

    def _kill_all(self) -> None:
        for pid, run in self._live.items():
            self._kill(pid, run, "cancelled")
        until = time.monotonic() + _DRAIN_S
        while time.monotonic() < until:
            try:
                pid, _, _ = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid:
                self._live.pop(pid, None)
            elif self._kill_strays() or self._live:
                time.sleep(0.002)


def main() -> None:
    """Say what this machine allows, then serve; arguments: package, socket fd, most runs at once, harness."""
    fd, max_concurrent, harness = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FDS, _MAX_FDS))
    sock = socket.socket(fileno=fd)
    with open(harness, "rb") as file:
        source = file.read()
    if os.getuid() == 0 and sys.platform == "linux":
        stdlib_through_fds()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    reason = _can_become_ordinary()
    server = Server(sock, max_concurrent, reason)
    server.trust(source)
    gc.collect()
    gc.freeze()
    sock.sendall(pack_frame({"uid_reason": reason}, []))
    server.serve()
