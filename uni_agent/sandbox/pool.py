"""The owner's end of the fork server: starts it, sends requests, turns replies into results.

In: a RunRequest. Out: a SandboxResult, or SandboxError where the sandbox itself failed. One ForkServer
serves any number of sandboxes and event loops at once. It never forks the process it lives in, so it is
safe beside torch's threads. It must not know what the code is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uni_agent.errors import SandboxError
from uni_agent.protocols import SandboxLimits, SandboxResult, SandboxStatus
from uni_agent.sandbox.fork_server import FIRST_UID, NUM_UIDS
from uni_agent.sandbox.frames import FrameReader, pack_frame

LEVEL = 1
"""Own session, rlimits, clean environment, private folder, kill of everything left; own uid under root."""

_PACKAGE = Path(__file__).parents[1]
HARNESS_PATH = Path(__file__).with_name("harness.py")
_BOOTSTRAP = """
import sys, types
for name, path in (("uni_agent", sys.argv[1]), ("uni_agent.sandbox", sys.argv[1] + "/sandbox")):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
from uni_agent.sandbox.fork_server import main
main()
"""
"""Imports the server without the package's own imports, which need more than the standard library."""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    # set order and hash() must not differ from one start to the next: same seed, same episode
    "PYTHONHASHSEED": "0",
}
_START_S = 20.0
_TIMEOUT_SIGNALS = (signal.SIGXCPU, signal.SIGPROF)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run: `argv` (a program, searched on PATH), or `code` (Python) where argv is empty."""

    folder: str
    uid: int | None
    limits: SandboxLimits
    argv: Sequence[str] = ()
    code: str = ""
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict[str, str])


Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Reply]"]
Reply = tuple[dict[str, Any], list[bytes]]


def _set_reply(future: asyncio.Future[Reply], reply: Reply | SandboxError) -> None:
    if future.done():
        return
    if isinstance(reply, SandboxError):
        future.set_exception(reply)
    else:
        future.set_result(reply)


class _Connection:
    """One server process, its socket, and the thread that reads its replies."""

    def __init__(self, max_concurrent: int) -> None:
        ours, theirs = socket.socketpair()
        flags = ("-S", "-s", "-P", "-B", "-u")
        arguments = [str(_PACKAGE), str(theirs.fileno()), str(max_concurrent), str(HARNESS_PATH)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOTSTRAP, *arguments],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's fork server cannot be started: {error}") from error
        finally:
            theirs.close()
        self._sock = ours
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._waiters: dict[int, Waiter] = {}
        self._ids = itertools.count()
        self.error: SandboxError | None = None
        self.uid_reason = self._hello()
        self._thread = threading.Thread(target=self._read, name="sandbox-replies", daemon=True)
        self._thread.start()

    def _hello(self) -> str:
        self._sock.settimeout(_START_S)
        try:
            while data := self._sock.recv(1 << 16):
                for meta, _ in self._reader.feed(data):
                    self._sock.settimeout(None)
                    return str(meta["uid_reason"])
        except OSError as error:
            self.close()
            raise SandboxError(
                f"the sandbox's fork server did not answer within {_START_S:g} s: {error}"
            ) from error
        assert self.process.stderr is not None
        said = self.process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        self.close()
        raise SandboxError(
            f"the sandbox's fork server ended at its start: {said[-1] if said else 'no message'}"
        )

    def _read(self) -> None:
        why = "closed the connection"
        try:
            while data := self._sock.recv(1 << 18):
                for meta, blobs in self._reader.feed(data):
                    self._settle(meta["id"], (meta, blobs))
        except OSError as error:
            why = f"cannot be reached: {error}"
        with self._lock:
            self.error = self.error or SandboxError(
                f"the sandbox's fork server {why}; the run's fate is unknown"
            )
            left = list(self._waiters)
        for run_id in left:
            self._settle(run_id, self.error)

    def _settle(self, run_id: int, reply: Reply | SandboxError) -> None:
        with self._lock:
            waiter = self._waiters.pop(run_id, None)
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_set_reply, future, reply)
            except RuntimeError:
                return  # its event loop has been closed: nobody waits

    def send(self, meta: dict[str, Any], blobs: Sequence[bytes]) -> tuple[int, asyncio.Future[Reply]]:
        """Send one request; return its id and where its reply will be."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        with self._lock:
            if self.error is not None:
                raise self.error
            run_id = next(self._ids)
            self._waiters[run_id] = (loop, future)
            self._write(pack_frame({**meta, "id": run_id}, blobs))
        return run_id, future

    def cancel(self, run_id: int) -> None:
        """Ask the server to kill a run; its reply then comes soon."""
        with self._lock:
            if self.error is None:
                self._write(pack_frame({"cancel": run_id}, []))

    def _write(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            self.error = SandboxError(f"the sandbox's fork server cannot be reached: {error}")
            self._sock.close()

    def close(self) -> None:
        """End the server and everything it runs; blocks until it is gone."""
        with contextlib.suppress(OSError):  # the other side may have gone first
            self._sock.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        if hasattr(self, "_thread"):
            self._thread.join()
        self._sock.close()


class ForkServer:
    """A warm Python process that runs untrusted code in children of its own.

    Starts at the first run, and again at the next run after it died. At most `max_concurrent` runs are
    live at once (default: twice the CPU cores, at least 4); others wait, and their clocks have not
    begun. `close` ends it and everything it runs; a closed one does not start again.
    """

    def __init__(self, *, max_concurrent: int | None = None) -> None:
        self._max_concurrent = max_concurrent or max(4, 2 * (os.cpu_count() or 1))
        self._connection: _Connection | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._uids = itertools.count(os.getpid())

    def _connect(self) -> _Connection:
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox pool is closed; open a new one")
            old = self._connection
            if old is not None and old.error is None:
                return old
            if old is not None:
                old.close()
                self._connection = None
            try:
                self._connection = _Connection(self._max_concurrent)
            except SandboxError:
                self._connection = _Connection(self._max_concurrent)  # starting is retried, running never
            return self._connection

    async def _connected(self) -> _Connection:
        connection = self._connection
        if connection is not None and connection.error is None and not self._closed:
            return connection
        return await asyncio.to_thread(self._connect)

    async def uid_reason(self) -> str:
        """Start, and say why runs cannot have a uid of their own; "" when they can."""
        return (await self._connected()).uid_reason

    async def new_uid(self) -> int | None:
        """A uid for one more sandbox; None where runs keep the owner's."""
        if await self.uid_reason():
            return None
        return FIRST_UID + next(self._uids) % NUM_UIDS

    async def run(self, request: RunRequest) -> SandboxResult:
        """Run to the end, or kill when cancelled. Raises SandboxError for the sandbox's own faults."""
        connection = await self._connected()
        limits = request.limits
        meta: dict[str, Any] = {
            "argv": list(request.argv),
            "env": dict(request.env),
            "folder": request.folder,
            "uid": request.uid,
            "limits": [
                limits.timeout_s,
                limits.cpu_s,
                limits.memory_bytes,
                limits.output_bytes,
                limits.file_bytes,
                limits.processes,
            ],
        }
        run_id, future = connection.send(meta, [request.code.encode("utf-8", "surrogatepass"), request.stdin])
        try:
            reply = await asyncio.shield(future)
        except asyncio.CancelledError:
            connection.cancel(run_id)
            await asyncio.wait([future], timeout=10)  # so that nothing lives on when the caller cleans up
            if future.done():
                future.exception()
            raise
        return result_of(reply, limits)

    async def close(self) -> None:
        """End the server; pending runs raise SandboxError. Closing twice is harmless."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def result_of(reply: Reply, limits: SandboxLimits) -> SandboxResult:
    """Judge a reply of the server: what happened to the code. Raises SandboxError."""
    meta, blobs = reply
    if meta["fault"]:
        raise SandboxError(f"the sandbox could not begin the run: {meta['fault']}")
    code = os.waitstatus_to_exitcode(meta["status"])
    number = -code if code < 0 else None
    sizes = (meta["out_size"], meta["err_size"])
    status: SandboxStatus
    if meta["reason"] == "timeout" or number in _TIMEOUT_SIGNALS:
        status = "timeout"
    elif number == signal.SIGKILL and meta["cpu_s"] >= math.ceil(limits.cpu_s):
        status = "timeout"  # it ignored the first signal
    elif number == signal.SIGXFSZ or max(sizes) >= limits.file_bytes:
        status = "output_limit"
    elif number == signal.SIGKILL or (code > 0 and _ended_in_memory_error(blobs[1])):
        status = "oom"
    elif number is not None:
        status = "signaled"
    else:
        status = "ok" if code == 0 else "nonzero"
    return SandboxResult(
        status=status,
        exit_code=code if code >= 0 else None,
        signal=number,
        stdout=blobs[0],
        stderr=blobs[1],
        stdout_truncated=sizes[0] > limits.output_bytes,
        stderr_truncated=sizes[1] > limits.output_bytes,
        wall_s=meta["wall_s"],
        cpu_s=meta["cpu_s"],
        peak_memory_bytes=meta["peak_bytes"],
        level=LEVEL,
    )


def _ended_in_memory_error(stderr: bytes) -> bool:
    lines = stderr.rstrip().rsplit(b"\n", 1)
    return lines[-1].startswith(b"MemoryError")
