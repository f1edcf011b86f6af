"""Grades a program by tests in a sandbox; shared by the `code_executor` tool and by rewards.

In: the program's source and tests, assert statements such as `assert add(1, 2) == 3`. Out: a TestReport.
One `run_python` per program. Where a test compares an expression with a literal, only the expression goes
into the sandbox and its value comes out; the comparison is made here, so a program can neither read what
is expected nor claim a verdict (printing "3/3 passed", `os._exit(0)`, an `__eq__` that always agrees).
Any other statement runs inside, and a program that takes the harness apart can cheat on it.
"""

from __future__ import annotations

import ast
import json
import operator
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from uni_agent.errors import TaskFileError
from uni_agent.protocols import Sandbox, SandboxLimits, SandboxResult, SandboxStatus
from uni_agent.sandbox.pool import HARNESS_PATH

DEFAULT_LIMITS = SandboxLimits(timeout_s=2.0, cpu_s=2.0, memory_bytes=512 << 20, processes=16)
"""Limits of one program with its tests: 2 s of CPU and of wall time."""

_HARNESS = HARNESS_PATH.read_text()
_RECORD_BYTES = 4 << 20
_MAX_REPR = 80

_OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_SYMMETRIC = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)


@dataclass(frozen=True, slots=True)
class TestReport:
    """How a program did on its tests.

    `failures` has one line per failed test, in the tests' order; where the program does not parse or
    load, a single line that says so. `status` is what became of the sandboxed process.
    """

    __test__ = False  # not a pytest class

    parsed: bool
    passed: int
    total: int
    failures: tuple[str, ...]
    status: SandboxStatus

    def text(self, max_failures: int = 1) -> str:
        """What the model reads: the score, then its first failures."""
        return "\n".join([f"{self.passed}/{self.total} tests passed", *self.failures[:max_failures]])


class _Test(NamedTuple):
    """A parsed test. `inside` is what the sandbox evaluates ("value") or executes ("run")."""

    source: str
    inside: str
    kind: Literal["value", "run"]
    holds: Callable[[Any], bool]
    expected: str


def check_tests(tests: Sequence[str], where: str) -> None:
    """Check that there are tests and that each parses. Raises TaskFileError, opened by `where`."""
    if not tests:
        raise TaskFileError(f"{where} has no tests; give at least one, such as 'assert add(1, 2) == 3'")
    for number, test in enumerate(tests, 1):
        try:
            _parse(test)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two: nesting
            reason = str(error) or "it is nested too deeply"
            raise TaskFileError(f"{where}: test {number} {cut(test)!r} is not Python: {reason}") from error


async def run_tests(
    sandbox: Sandbox, program: str, tests: Sequence[str], limits: SandboxLimits = DEFAULT_LIMITS
) -> TestReport:
    """Run the program, then its tests in order, in one process; a time-out fails what is left.

    Raises SandboxError; TaskFileError where a test is not Python or there is none.
    """
    check_tests(tests, "the task")
    parsed = [_parse(test) for test in tests]
    nonce = secrets.token_hex(16)
    request = {"nonce": nonce, "program": program, "checks": [(test.kind, test.inside) for test in parsed]}
    result = await sandbox.run_python(
        _HARNESS,
        stdin=json.dumps(request).encode(),
        limits=replace(limits, output_bytes=max(limits.output_bytes, _RECORD_BYTES)),
    )
    records = _records(result.stdout, nonce)
    loaded = records.get(-1)
    if loaded is None or "ran" not in loaded:
        unparsed = loaded is not None and "unparsed" in loaded
        return TestReport(not unparsed, 0, len(tests), (_load_failure(loaded, result),), result.status)
    failures: list[str] = []
    lost = False
    for at, test in enumerate(parsed):
        record = records.get(at)
        line = _failure(test, record, result, lost)
        lost = lost or record is None
        if line is not None:
            failures.append(line)
    return TestReport(True, len(tests) - len(failures), len(tests), tuple(failures), result.status)


# --- tests ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def _parse(source: str) -> _Test:
    """Split a test into what runs inside and what is compared outside. Raises SyntaxError, ValueError."""
    body = ast.parse(source).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return _Test(source.strip(), source, "run", bool, "")
    test = body[0].test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _parse_comparison(source, test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inside = ast.unparse(test.operand)
        return _Test(inside, inside, "value", operator.not_, "False")
    inside = ast.unparse(test)
    return _Test(inside, inside, "value", bool, "True")


def _parse_comparison(source: str, test: ast.Compare) -> _Test:
    left, op, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(op, _SYMMETRIC) and _is_literal(left) and not _is_literal(right):
        left, right = right, left
    if not _is_literal(right):
        return _Test(ast.unparse(test), source, "run", bool, "")
    inside, value, compare = ast.unparse(left), ast.literal_eval(right), _OPERATORS[type(op)]

    def holds(got: Any) -> bool:
        return bool(compare(got, value))

    if isinstance(op, ast.Eq | ast.Is):
        return _Test(inside, inside, "value", holds, ast.unparse(right))
    # the operator's text is what stands before the right side
    sign = ast.unparse(ast.Compare(ast.Name("_"), [op], [ast.Name("_")])).split(" ", 1)[1].rsplit(" ", 1)[0]
    wanted = f"a value {sign} {ast.unparse(right)}"
    return _Test(inside, inside, "value", holds, wanted)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


# --- what came out --------------------------------------------------------------------------------


class _Opaque(NamedTuple):
    """A value that is not made of builtin types: only its repr came out. It equals nothing."""

    text: str
    truth: bool

    def __bool__(self) -> bool:
        return self.truth

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return self.text


def _records(stdout: bytes, nonce: str) -> dict[int, dict[str, Any]]:
    """The first record of each check among the lines that carry the nonce; anything may be on stdout."""
    records: dict[int, dict[str, Any]] = {}
    key = nonce.encode()
    for line in stdout.split(b"\n"):
        if not line.startswith(key):
            continue
        try:
            at, record = json.loads(line[len(key) :])
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(at, int) and isinstance(record, dict):
            records.setdefault(at, record)
    return records


def _decode(content: Any) -> Any:
    """Undo `harness.encode`. The text is untrusted: raises ValueError, TypeError, RecursionError, ..."""
    if content is None or isinstance(content, bool | str):
        return content
    ((tag, body),) = content.items()
    match tag:
        case "int":
            return int(body, 16)
        case "float":
            return float(body)
        case "complex":
            return complex(float(body[0]), float(body[1]))
        case "bytes":
            return bytes.fromhex(body)
        case "dict":
            return {_decode(key): _decode(value) for key, value in body}
        case "list":
            return [_decode(item) for item in body]
        case "tuple":
            return tuple(_decode(item) for item in body)
        case "set":
            return {_decode(item) for item in body}
        case "frozenset":
            return frozenset(_decode(item) for item in body)
        case _:
            raise ValueError(f"unknown tag {tag!r}")


def _value_of(record: Mapping[str, Any]) -> Any:
    if "value" in record:
        try:
            return _decode(record["value"])
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            return _Opaque("something unreadable", False)
    return _Opaque(str(record.get("opaque", "")), record.get("truth") is True)


def _passes(test: _Test, record: Mapping[str, Any]) -> bool:
    if test.kind == "run":
        return record.get("ran") is True
    if "value" not in record and "opaque" not in record:
        return False
    try:
        return test.holds(_value_of(record))
    except (TypeError, ValueError, RecursionError):
        return False  # as `None < 3` would raise inside


# --- what the model reads -------------------------------------------------------------------------


def cut(text: str, limit: int = _MAX_REPR) -> str:
    """Shorten a repr or a message to one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _show(value: Any) -> str:
    try:
        return cut(repr(value))
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"


def _fate(result: SandboxResult) -> str:
    match result.status:
        case "timeout":
            return "timed out"
        case "oom":
            return "ran out of memory"
        case "output_limit":
            return "wrote too much"
        case "signaled" if result.signal is not None:
            return f"crashed with {signal.Signals(result.signal).name}"
        case _:
            return "ended the process"


def _load_failure(record: Mapping[str, Any] | None, result: SandboxResult) -> str:
    """Say in one line why the program did not parse or load."""
    if record is None:
        return f"the program {_fate(result)}"
    at = f"line {record['line']}: " if record.get("line") else ""
    if "unparsed" in record:
        return at + cut(str(record["unparsed"]))
    return f"{at}{record.get('error')}: {cut(str(record.get('text', '')))}"


def _failure(test: _Test, record: Mapping[str, Any] | None, result: SandboxResult, lost: bool) -> str | None:
    """Say in one line how a test failed; None when it passed. Every feedback text is made here."""
    source = cut(test.source)
    if record is None:
        return f"{source} was not reached" if lost else f"{source} {_fate(result)}"
    if _passes(test, record):
        return None
    if record.get("error") == "AssertionError" and test.kind == "run":
        return f"{source} failed"
    if "error" in record:
        text = cut(str(record.get("text", "")))
        return f"{source} raised {record['error']}" + (f": {text}" if text else "")
    return f"{source} returned {_show(_value_of(record))}, expected {cut(test.expected)}"
