"""What isolation this machine gives, found out by trying it; for `uni-agent doctor`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from uni_agent.errors import SandboxError
from uni_agent.protocols import SandboxLimits
from uni_agent.sandbox.local import local_sandbox
from uni_agent.sandbox.pool import LEVEL

_ATTEMPTS = """
import os, subprocess, sys
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open("left", "w").write(str(os.getpid()))
    while True:
        pass
os.waitpid(child, 0)
while not os.path.exists("left"):
    pass
try:
    bytearray(1 << 30)
    print("memory")
except MemoryError:
    pass
sys.stdout.write("done")
"""


@dataclass(frozen=True, slots=True)
class SandboxProbe:
    """The level that untrusted code runs under here, why it is not higher, and what would raise it."""

    level: int
    reason: str
    advice: str


async def probe() -> SandboxProbe:
    """Leave a process and take too much memory in a sandbox; say what came of it."""
    limits = SandboxLimits(timeout_s=10, cpu_s=5, memory_bytes=256 << 20)
    try:
        async with local_sandbox(limits=limits) as sandboxes, sandboxes() as sandbox:
            result = await sandbox.run_python(_ATTEMPTS)
            left = int(await sandbox.read("left"))
            user = await sandboxes.server.uid_reason()
    except (SandboxError, ValueError) as error:
        return SandboxProbe(0, f"the sandbox does not work here: {error}", "run on Linux with /proc mounted")
    await asyncio.sleep(0)
    if result.stdout != b"done":
        return SandboxProbe(
            0, f"the memory limit does not hold ({result.status}: {result.stdout_text!r})", "run on Linux"
        )
    if _is_alive(left):
        return SandboxProbe(0, "a process that detached itself outlived its run", "run on Linux")
    return SandboxProbe(
        LEVEL,
        "rlimits, own session, clean environment, private folder"
        + (f"; {user}" if user else ", own user; the network and world-readable files stay reachable"),
        "levels 2 and 3 (Landlock, namespaces) are not in this version"
        + ("; start as root, with Python outside /root, to give each sandbox its own user" if user else ""),
    )


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
