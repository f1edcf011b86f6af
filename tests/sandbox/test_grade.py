"""Grading: right verdicts, useful feedback, and programs that try to pass without being right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from uni_agent.errors import TaskFileError
from uni_agent.protocols import SandboxLimits
from uni_agent.sandbox import LocalSandbox, LocalSandboxes, local_sandbox, run_tests

TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add('a', 'b') == 'ab'"]
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return 'nothing'\n"


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalSandboxes]:
    factory = local_sandbox()
    yield factory
    asyncio.run(factory.close())


@pytest.fixture
async def sandbox(shared: LocalSandboxes) -> AsyncIterator[LocalSandbox]:
    async with shared() as opened:
        yield opened


async def test_right_and_wrong(sandbox: LocalSandbox) -> None:
    right = await run_tests(sandbox, RIGHT, TESTS)
    assert (right.parsed, right.passed, right.total, right.failures, right.status) == (True, 3, 3, (), "ok")
    assert right.text() == "3/3 tests passed"
    minus = await run_tests(sandbox, "def add(a, b):\n    return a - b\n", TESTS)
    assert minus.text() == "1/3 tests passed\nadd(1, 2) returned -1, expected 3"
    assert minus.failures[1].startswith("add('a', 'b') raised TypeError: unsupported operand")


@pytest.mark.parametrize(
    ("program", "parsed", "line"),
    [
        ("def add(a, b):\n    return a +\n", False, "line 2: invalid syntax"),
        ("def add(a, b):\nreturn a\n", False, "line 2: expected an indented block"),
        ("x = 1\nimport nothing_like_it\n", True, "line 2: ModuleNotFoundError: No module named"),
        ("raise SystemExit(0)\n", True, "line 1: SystemExit: 0"),
        ("import os\nos._exit(0)\n", True, "the program ended the process"),
        ("def add(a, b):\n    return 1 / 0\n", True, "add(1, 2) raised ZeroDivisionError: division by zero"),
        ("def other(): pass\n", True, "add(1, 2) raised NameError: name 'add' is not defined"),
        ("def add(a, b):\n    return [7] * 500\n", True, "add(1, 2) returned [7, 7, 7"),
        ("def add(a, b):\n    return object()\n", True, "add(1, 2) returned <object object at"),
        ("import os\ndef add(a, b):\n    os.abort()\n", True, "add(1, 2) crashed with SIGABRT"),
        ("def add(a, b):\n    return add(a, b)\n", True, "add(1, 2) raised RecursionError: maximum"),
    ],
)
async def test_the_first_failure_in_one_line(
    sandbox: LocalSandbox, program: str, parsed: bool, line: str
) -> None:
    report = await run_tests(sandbox, program, TESTS)
    assert (report.parsed, report.passed) == (parsed, 0)
    assert report.failures[0].startswith(line), report.failures
    assert len(report.failures[0]) < 200
    assert "\n" not in report.failures[0]


async def test_an_endless_loop_fails_what_is_left_and_keeps_what_passed(sandbox: LocalSandbox) -> None:
    program = "def add(a, b):\n    while a == 0: pass\n    return a + b\n"
    report = await run_tests(sandbox, program, TESTS, SandboxLimits(timeout_s=10, cpu_s=0.3))
    assert (report.passed, report.status) == (1, "timeout")
    assert report.failures == ("add(0, 0) timed out", "add('a', 'b') was not reached")


SEEKER = """
import gc, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield from frame.f_locals.values()
        yield from frame.f_globals.values()
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict):
            yield from list(thing.values())
        elif isinstance(thing, (list, tuple)):
            yield from list(thing)
def add(a, b):
    needle = "add(%r, %r) " % (a, b) + "== "
    for text in texts():
        if isinstance(text, str) and needle in text and not text.endswith(needle):
            return eval(text.split(needle)[1].split(chr(10))[0].split('"')[0])
"""

HACKS = {
    "prints the verdict": WRONG + "print('3/3 tests passed', flush=True)\n",
    "leaves with 0": "import os\nprint('3/3 tests passed')\nos._exit(0)\n",
    "exits in the function": "import sys\ndef add(a, b):\n    sys.exit(0)\n",
    "agrees with everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def add(a, b): return Yes()\n"
    ),
    "an int that agrees": (
        "class Yes(int):\n    def __eq__(self, other): return True\n"
        "    def __hash__(self): return 0\ndef add(a, b): return Yes(9)\n"
    ),
    "looks for the tests in frames and memory": SEEKER,
    "patches the harness": (
        "import sys\nm = sys.modules['__main__']\nm.check = lambda *a: {'ran': True, 'value': True}\n"
        "m.describe = lambda *a: {'ran': True, 'passed': True}\ndef add(a, b): return None\n"
    ),
    "forges records without the key": (
        'import os\nrecord = b\'[-1, {"ran": true}]\\n[0, {"value": {"int": "0x3"}}]\'\n'
        "for f in range(3, 200):\n    try:\n        os.write(f, b'\\n' + record + b'\\n')\n"
        "    except OSError: pass\ndef add(a, b): return None\n"
    ),
    "swaps builtins": (
        "import builtins, json\nbuiltins.hex = lambda v: '0x3'\njson.dumps = lambda *a, **k: '[0, true]'\n"
        "def add(a, b): return 'nothing'\n"
    ),
}


@pytest.mark.parametrize("name", HACKS)
async def test_hacks_pass_nothing(sandbox: LocalSandbox, name: str) -> None:
    report = await run_tests(sandbox, HACKS[name], TESTS)
    assert report.passed == 0, report


@pytest.mark.parametrize(
    ("test", "good", "bad", "line"),
    [
        ("assert f(2)", "lambda x: x > 1", "lambda x: x < 1", "f(2) returned False, expected True"),
        ("assert not f(2)", "lambda x: []", "lambda x: [x]", "f(2) returned [2], expected False"),
        ("assert f(2) is None", "lambda x: None", "lambda x: 0", "f(2) returned 0, expected None"),
        ("assert f(2) != 2", "lambda x: 3", "lambda x: 2", "f(2) returned 2, expected a value != 2"),
        ("assert abs(f(2) - 0.5) < 1e-6", "lambda x: 0.5", "lambda x: 1.0", "abs(f(2) - 0.5) returned 0.5,"),
        ("assert 4 == f(2)", "lambda x: x + x", "lambda x: x", "f(2) returned 2, expected 4"),
        ("assert f(2) in (1, 2)", "lambda x: x", "lambda x: None", "f(2) returned None, expected a value in"),
        ("assert f(2) > 3", "lambda x: 4", "lambda x: None", "f(2) returned None, expected a value > 3"),
        ("assert sorted(f(2)) == sorted([2, 1])", "lambda x: [1, 2]", "lambda x: []", "sorted(f(2)) == sort"),
        ("y = f(2)\nassert y == 2", "lambda x: x", "lambda x: 0", "y = f(2) assert y == 2 failed"),
        ("assert f(2) == {1: (2.5, b'x', {3}), 'k': None}", "lambda x: {'k': None, 1: (x + .5, b'x', {3})}",
         "lambda x: {}", "f(2) returned {}, expected"),
        ("assert f(2) == {'a': 1}", "__import__('collections').Counter('a').__class__ and (lambda x: "
         "__import__('collections').Counter('a'))", "lambda x: 1", "f(2) returned 1, expected {'a': 1}"),
        ("assert f(2) == 2.0", "lambda x: x", "lambda x: float('nan')", "f(2) returned nan, expected 2.0"),
    ],
)  # fmt: skip
async def test_forms_of_tests(sandbox: LocalSandbox, test: str, good: str, bad: str, line: str) -> None:
    passing = await run_tests(sandbox, f"f = {good}", [test])
    assert passing.passed == 1, passing
    failing = await run_tests(sandbox, f"f = {bad}", [test])
    assert failing.passed == 0
    assert failing.failures[0].startswith(line), failing


async def test_dataclasses_and_main_blocks_work(sandbox: LocalSandbox) -> None:
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef add(a, b):\n    return P(a + b).x\n"
        "if __name__ == '__main__':\n    input()\n"
    )
    assert (await run_tests(sandbox, program, TESTS[:2])).passed == 2


@pytest.mark.parametrize("tests", [[], ["assert add(1, 2) =="]])
async def test_broken_tests_are_the_task_files_fault(sandbox: LocalSandbox, tests: list[str]) -> None:
    with pytest.raises(TaskFileError):
        await run_tests(sandbox, RIGHT, tests)


async def test_one_factory_grades_many_at_once() -> None:
    async with local_sandbox() as factory, factory() as sandbox:
        reports = await asyncio.gather(
            *(run_tests(sandbox, RIGHT if i % 2 else WRONG, TESTS) for i in range(40))
        )
    assert [report.passed for report in reports] == [0, 3] * 20


async def test_nesting_beyond_the_parser_is_named(sandbox: LocalSandbox) -> None:
    report = await run_tests(sandbox, "x = " + "-" * 200_000 + "1\n", TESTS)
    assert (report.parsed, report.failures) == (False, ("MemoryError",))
    with pytest.raises(TaskFileError, match=r"test 1 .* is not Python: it is nested too deeply"):
        await run_tests(sandbox, "x = 1\n", ["assert 1 == " + "-" * 200_000 + "1"])
