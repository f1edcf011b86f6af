"""The local sandbox: untrusted programs on this machine, at isolation level 1.

Level 1 is: a session of its own, rlimits, a clean environment, a private folder, a wall clock that kills
whatever the run left, capped output, and a user of its own where root starts it. It does not hide the
network or the world-readable part of the file system, and it bounds the folder's size per file only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from uni_agent.errors import SandboxError
from uni_agent.protocols import SandboxLimits, SandboxResult
from uni_agent.sandbox.folder import make_folder, read_file, remove_folder, write_file
from uni_agent.sandbox.pool import ForkServer, RunRequest


@dataclass(frozen=True, slots=True)
class _Place:
    folder: Path
    uid: int | None


class LocalSandbox:
    """A private folder and a fork server that runs programs in it; used with `async with`.

    Without a `server` it starts one of its own and closes it at the end. `limits` hold for every run
    that brings none. `parent` is where the private folder is made (default: the system's).
    """

    def __init__(
        self,
        server: ForkServer | None = None,
        *,
        limits: SandboxLimits | None = None,
        parent: Path | None = None,
    ) -> None:
        self._owns_server = server is None
        self._server = server or ForkServer()
        self._limits = limits or SandboxLimits()
        self._parent = parent
        self._place: _Place | None = None

    async def __aenter__(self) -> LocalSandbox:
        uid = await self._server.new_uid()
        self._place = _Place(make_folder(self._parent, uid), uid)
        return self

    async def __aexit__(self, *exc: object) -> None:
        place, self._place = self._place, None
        try:
            if place is not None:
                await asyncio.to_thread(remove_folder, place.folder)
        finally:
            if self._owns_server:
                await self._server.close()

    @property
    def folder(self) -> Path:
        """The private folder, also the programs' working directory and HOME."""
        return self._open().folder

    def _open(self) -> _Place:
        if self._place is None:
            raise SandboxError("the sandbox is not open; use it inside `async with`")
        return self._place

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program, found on the clean PATH; `env` is added to the clean environment.

        A program that does not exist is exit code 127, as in a shell. Raises SandboxError.
        """
        if not argv:
            raise SandboxError("exec got an empty argv; give the program's name and its arguments")
        place = self._open()
        return await self._server.run(
            RunRequest(
                folder=str(place.folder),
                uid=place.uid,
                limits=limits or self._limits,
                argv=argv,
                stdin=stdin,
                env=env or {},
            )
        )

    async def run_python(
        self, code: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> SandboxResult:
        """Run Python code as a fresh `__main__` in a forked, warm interpreter (standard library only).

        Raises SandboxError.
        """
        place = self._open()
        return await self._server.run(
            RunRequest(
                folder=str(place.folder), uid=place.uid, limits=limits or self._limits, code=code, stdin=stdin
            )
        )

    async def read(self, path: str) -> bytes:
        """Read a plain file of the folder. Raises SandboxError."""
        place = self._open()
        return await asyncio.to_thread(read_file, place.folder, path, limit_bytes=self._limits.file_bytes)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file in the folder, making its folders. Raises SandboxError."""
        place = self._open()
        await asyncio.to_thread(write_file, place.folder, path, content, uid=place.uid)


class LocalSandboxes:
    """Makes local sandboxes that share one fork server; a SandboxFactory. `close` ends the server."""

    def __init__(
        self, *, limits: SandboxLimits | None = None, parent: Path | None = None, max_concurrent: int | None
    ) -> None:
        self.server = ForkServer(max_concurrent=max_concurrent)
        self._limits = limits
        self._parent = parent

    def __call__(self) -> LocalSandbox:
        return LocalSandbox(self.server, limits=self._limits, parent=self._parent)

    async def close(self) -> None:
        """End the fork server and everything that runs in it. Closing twice is harmless."""
        await self.server.close()

    async def __aenter__(self) -> LocalSandboxes:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def local_sandbox(
    *, limits: SandboxLimits | None = None, parent: Path | None = None, max_concurrent: int | None = None
) -> LocalSandboxes:
    """Make a factory of local sandboxes that share one fork server, started at the first use.

    At most `max_concurrent` runs are live at once (None: twice the CPU cores, at least 4).
    """
    return LocalSandboxes(limits=limits, parent=parent, max_concurrent=max_concurrent)
