"""The local sandbox: statuses, limits, clean-up, folders, and the fork server behind it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from uni_agent.errors import SandboxError
from uni_agent.protocols import SandboxLimits
from uni_agent.sandbox import LocalSandbox, LocalSandboxes, local_sandbox, probe

FAST = SandboxLimits(timeout_s=5, cpu_s=5, memory_bytes=256 << 20, output_bytes=1000, file_bytes=1 << 20)
SHORT = SandboxLimits(timeout_s=0.6, cpu_s=30)


@pytest.fixture
async def sandboxes() -> AsyncIterator[LocalSandboxes]:
    async with local_sandbox(limits=FAST) as factory:
        yield factory


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalSandboxes]:
    factory = local_sandbox(limits=FAST)
    yield factory
    asyncio.run(factory.close())


@pytest.fixture
async def sandbox(shared: LocalSandboxes) -> AsyncIterator[LocalSandbox]:
    async with shared() as opened:
        yield opened


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def server_pid(sandboxes: LocalSandboxes) -> int:
    connection = sandboxes.server._connection
    assert connection is not None
    return connection.process.pid


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "number"),
    [
        ("print('hi')", "ok", 0, None),
        ("import sys; sys.exit(3)", "nonzero", 3, None),
        ("1/0", "nonzero", 1, None),
        ("import os; os.kill(os.getpid(), 11)", "signaled", None, signal.SIGSEGV),
        ("x = bytearray(1 << 30)", "oom", 1, None),
        ("while True: print('x' * 10000)", "output_limit", None, signal.SIGXFSZ),
    ],
)
async def test_run_python_says_what_happened(
    sandbox: LocalSandbox, code: str, status: str, exit_code: int | None, number: int | None
) -> None:
    result = await sandbox.run_python(code)
    assert (result.status, result.exit_code, result.signal) == (status, exit_code, number)
    assert result.level == 1
    assert result.wall_s > 0
    assert result.peak_memory_bytes > 1 << 20


async def test_a_busy_loop_ends_by_its_cpu_limit(sandbox: LocalSandbox) -> None:
    result = await sandbox.run_python("while True: pass", limits=SandboxLimits(timeout_s=20, cpu_s=0.2))
    assert result.status == "timeout"
    assert 0.1 < result.cpu_s < 1


async def test_a_traceback_shows_the_line(sandbox: LocalSandbox) -> None:
    result = await sandbox.run_python("x = 1\nboom(x)\n")
    assert 'File "main.py", line 2' in result.stderr_text
    assert "boom(x)" in result.stderr_text


async def test_runs_are_clean_and_private(sandbox: LocalSandbox) -> None:
    os.environ["UNI_AGENT_TEST_SECRET"] = "s3cret"
    try:
        first = await sandbox.run_python("import os, sys; sys.leak = 1; print(dict(os.environ), os.getcwd())")
    finally:
        del os.environ["UNI_AGENT_TEST_SECRET"]
    assert "s3cret" not in first.stdout_text
    assert str(sandbox.folder) in first.stdout_text
    second = await sandbox.run_python(
        "import os, sys; print(hasattr(sys, 'leak'), __name__, len(os.listdir('/proc/self/fd')))"
    )
    leak, name, fds = second.stdout_text.split()
    assert (leak, name) == ("False", "__main__")
    assert int(fds) <= 7  # the three streams, the library's folders, and the listing itself


async def test_stdin_and_imports_of_own_files(sandbox: LocalSandbox) -> None:
    await sandbox.write("lib/helper.py", b"def twice(x):\n    return 2 * x\n")
    await sandbox.write("main_input.txt", b"21")
    result = await sandbox.run_python(
        "import csv\nfrom lib.helper import twice\nprint(twice(int(open('main_input.txt').read())), input())",
        stdin=b"line\n",
    )
    assert result.stdout == b"42 line\n", result.stderr_text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a sandbox its own user")
async def test_root_runs_code_as_an_ordinary_user_of_its_own(sandboxes: LocalSandboxes) -> None:
    async with sandboxes() as one, sandboxes() as other:
        code = "import os; print(os.getuid(), os.geteuid(), os.getgroups())"
        uids = [(await box.run_python(code)).stdout_text.split()[0] for box in (one, other)]
        assert "0" not in uids
        assert uids[0] != uids[1]
        await other.write("secret", b"x")
        peek = await one.run_python(f"open({str(other.folder / 'secret')!r})")
        assert "PermissionError" in peek.stderr_text


async def test_exec_runs_programs(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec(["sh", "-c", "cat; echo $X; exit 4"], stdin=b"in\n", env={"X": "y"})
    assert (result.status, result.exit_code, result.stdout) == ("nonzero", 4, b"in\ny\n")
    missing = await sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr


async def test_s09_non_utf8_output(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec(["printf", r"\226ab\377\000c"])
    assert result.stdout == b"\x96ab\xff\x00c"
    assert "ab" in result.stdout_text
    assert result.status == "ok"


async def test_s10_huge_output_keeps_head_and_tail(sandbox: LocalSandbox) -> None:
    result = await sandbox.run_python("print('first' + 'x' * 50000 + 'last')")
    assert result.status == "ok"
    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert result.stdout.startswith(b"firstx")
    assert result.stdout.endswith(b"last\n")
    assert b"[49010 bytes dropped]" in result.stdout
    flood = await sandbox.exec(["sh", "-c", "yes | head -c 200000000"])
    assert flood.status == "output_limit"
    assert len(flood.stdout) < 1100


async def test_s10_a_timeout_keeps_what_came_before(sandbox: LocalSandbox) -> None:
    for result in (
        await sandbox.exec(["sh", "-c", "echo before; sleep 100"], limits=SHORT),
        await sandbox.run_python(
            "import time; print('before', end=''); print(file=None); time.sleep(9)", limits=SHORT
        ),
    ):
        assert result.status == "timeout"
        assert result.stdout.startswith(b"before")
        assert 0.5 < result.wall_s < 4


async def test_s04_no_process_outlives_a_timeout(sandbox: LocalSandbox) -> None:
    code = """
import os, signal, time
def child(detach):
    if os.fork():
        return
    if detach:
        os.setsid()
        if os.fork():
            os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(100)
for detach in (False, True):
    child(detach)
time.sleep(100)
"""
    result = await sandbox.run_python(code, limits=SHORT)
    pids = [int(word) for word in result.stdout.split()]
    assert result.status == "timeout"
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]


async def test_a_run_that_ends_leaves_no_background_process(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec(["sh", "-c", "sleep 100 & echo $!"])
    assert result.status == "ok"
    assert not is_alive(int(result.stdout))


async def test_cancelling_kills(sandbox: LocalSandbox) -> None:
    code = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(100)"
    run = asyncio.create_task(sandbox.run_python(code))
    for _ in range(500):
        if (sandbox.folder / "pid").exists() and (sandbox.folder / "pid").read_text():
            break
        await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not is_alive(int(await sandbox.read("pid")))


async def test_cancelling_a_run_that_waits_for_a_place() -> None:
    async with local_sandbox(max_concurrent=1) as factory, factory() as sandbox:
        first = asyncio.create_task(sandbox.exec(["sleep", "0.5"]))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(sandbox.run_python("open('ran', 'w')"))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert (await first).status == "ok"
        assert not (sandbox.folder / "ran").exists()


async def test_the_clock_of_a_waiting_run_has_not_begun() -> None:
    limits = SandboxLimits(timeout_s=1.5)
    async with local_sandbox(max_concurrent=1, limits=limits) as factory, factory() as sandbox:
        results = await asyncio.gather(*(sandbox.exec(["sleep", "0.5"]) for _ in range(4)))
        assert [result.status for result in results] == ["ok"] * 4


async def test_a_fork_bomb_is_bounded_and_cleared(sandbox: LocalSandbox) -> None:
    limits = SandboxLimits(timeout_s=0.6, processes=10)
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    result = await sandbox.run_python(code, limits=limits)
    assert result.status == "timeout"
    assert (await sandbox.run_python("print(1)")).stdout == b"1\n"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "."])
async def test_paths_stay_inside(sandbox: LocalSandbox, path: str) -> None:
    with pytest.raises(SandboxError):
        await sandbox.read(path)
    with pytest.raises(SandboxError):
        await sandbox.write(path, b"x")


async def test_links_made_inside_lead_nowhere(sandbox: LocalSandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("before")
    made = await sandbox.run_python(
        f"import os\nos.symlink({str(victim)!r}, 'link')\n"
        f"os.symlink({str(tmp_path)!r}, 'dir')\nos.mkfifo('fifo')"
    )
    assert made.status == "ok", made.stderr_text
    for path in ("link", "dir/victim", "fifo"):
        with pytest.raises(SandboxError):
            await asyncio.wait_for(sandbox.read(path), 5)
        with pytest.raises(SandboxError):
            await asyncio.wait_for(sandbox.write(path, b"after"), 5)
    assert victim.read_text() == "before"


async def test_read_gives_back_what_was_written(sandbox: LocalSandbox) -> None:
    await sandbox.write("deep/er/file", b"long content")
    await sandbox.write("deep/er/file", b"short")
    assert await sandbox.read("deep/er/file") == b"short"
    changed = await sandbox.run_python("open('deep/er/file', 'a').write('er')")
    assert changed.status == "ok", changed.stderr_text
    assert await sandbox.read("deep/er/file") == b"shorter"
    with pytest.raises(SandboxError, match="missing"):
        await sandbox.read("missing")


async def test_the_folder_goes_at_exit_and_a_closed_sandbox_refuses(sandboxes: LocalSandboxes) -> None:
    async with sandboxes() as sandbox:
        folder = sandbox.folder
        await sandbox.run_python("import os; os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a', 0)")
        assert folder.exists()
    assert not folder.exists()
    with pytest.raises(SandboxError, match="not open"):
        await sandbox.run_python("1")


async def test_200_runs_leave_no_descriptor_process_or_folder(sandboxes: LocalSandboxes) -> None:
    async with sandboxes() as sandbox:
        await asyncio.gather(*(sandbox.run_python("1") for _ in range(10)))
        pid = server_pid(sandboxes)

        def count() -> tuple[int, int, int]:
            own, server = (len(os.listdir(f"/proc/{p}/fd")) for p in ("self", pid))
            return own, server, len(list(sandbox.folder.iterdir()))

        before = count()
        tails = ["pass", "1/0", "import os; os.kill(os.getpid(), 9)", "import os; os.fork()"]
        results = await asyncio.gather(*(sandbox.run_python(tails[i % 4]) for i in range(200)))
        assert {result.status for result in results} == {"ok", "nonzero", "oom"}
        assert count() == before
        folder = sandbox.folder
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert children == []
    assert not folder.exists()
    await sandboxes.close()
    assert not is_alive(pid)


def test_several_event_loops_one_after_the_other() -> None:
    factory = local_sandbox()

    async def once() -> bytes:
        async with factory() as sandbox:
            return (await sandbox.run_python("print('ok')")).stdout

    assert [asyncio.run(once()) for _ in range(3)] == [b"ok\n"] * 3
    pid = server_pid(factory)
    asyncio.run(factory.close())
    assert not is_alive(pid)


async def test_a_dead_server_is_a_sandbox_error_and_comes_back(sandboxes: LocalSandboxes) -> None:
    async with sandboxes() as sandbox:
        run = asyncio.create_task(sandbox.run_python("import time; time.sleep(100)"))
        await asyncio.sleep(0.5)
        first = server_pid(sandboxes)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SandboxError, match="fork server"):
            await run
        assert (await sandbox.run_python("print('again')")).stdout == b"again\n"
        assert server_pid(sandboxes) != first


async def test_a_sandbox_fault_is_an_error_not_a_result(sandboxes: LocalSandboxes) -> None:
    async with sandboxes() as sandbox:
        sandbox.folder.rename(sandbox.folder.with_suffix(".away"))
        try:
            with pytest.raises(SandboxError, match="could not begin"):
                await sandbox.run_python("1")
        finally:
            sandbox.folder.with_suffix(".away").rename(sandbox.folder)


async def test_closed_pool_refuses() -> None:
    factory = local_sandbox()
    await factory.close()
    with pytest.raises(SandboxError, match="closed"):
        async with factory():
            pass


async def test_the_event_loop_is_never_blocked(sandbox: LocalSandbox) -> None:
    worst, stop = 0.0, False

    async def heartbeat() -> None:
        nonlocal worst
        while not stop:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst = max(worst, time.monotonic() - before)

    beat = asyncio.create_task(heartbeat())
    await asyncio.gather(*(sandbox.exec(["sleep", "0.3"]) for _ in range(8)))
    stop = True
    await beat
    assert worst < 0.25


async def test_probe_names_the_level_and_what_would_raise_it() -> None:
    found = await probe()
    assert found.level == 1, found
    assert "rlimits" in found.reason
    assert found.advice
