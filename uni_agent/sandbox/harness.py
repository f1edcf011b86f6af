"""Runs inside the sandbox, beside the program it tests; `grade.py` is the other side.

In, on stdin: the program, a nonce, and what to evaluate. Out, on a private copy of stdout: one record per
check, each line opened by the nonce. For a comparison only the left side comes in, and its *value* goes
out: what is expected is never in this process, so the program cannot read it, patch it, or claim it.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

_MAX_RECORD = 1 << 18


def encode(value: Any) -> Any:
    """A value as tagged JSON: builtin types by content, [type name, repr] for anything else."""
    if value is None or isinstance(value, bool | str):
        return value if not isinstance(value, str) else str.__str__(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items: Any = value
            return {kind.__name__: [encode(item) for item in items]}
    raise TypeError(type(value).__name__)


def describe(value: Any) -> dict[str, Any]:
    """What is told of a value: its content, or only its type and repr where that cannot be sent."""
    try:
        content = encode(value)
        if len(json.dumps(content)) <= _MAX_RECORD:
            return {"value": content}
    except BaseException:
        pass
    try:
        text = repr(value)[:200]
    except BaseException:
        text = f"<{type(value).__name__}>"
    try:
        truth = bool(value)
    except BaseException:
        truth = False
    return {"opaque": text, "truth": truth}


def error_of(error: BaseException) -> dict[str, Any]:
    """An exception as a record, with the last line of the program that it passed through."""
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "program.py":
            line = frame.tb_lineno
        frame = frame.tb_next
    try:
        text = str(error)[:300]
    except BaseException:
        text = ""
    return {"error": type(error).__name__, "text": text, "line": line}


def check(kind: str, source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Evaluate an expression and tell its value, or execute statements and tell that they ran."""
    try:
        if kind == "value":
            return describe(eval(compile(source, "test", "eval", dont_inherit=True), names))
        exec(compile(source, "test", "exec", dont_inherit=True), names)
    except BaseException as error:
        return error_of(error)
    return {"ran": True}


def run() -> None:
    """Load the program, then answer each check in order; ends the process."""
    request = json.loads(sys.stdin.buffer.read())
    nonce, program, checks = request["nonce"], request["program"], request["checks"]
    dumps, write, channel, leave = json.dumps, os.write, os.dup(1), os._exit
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    def report(at: int, record: dict[str, Any]) -> None:
        data = memoryview(f"\n{nonce}{dumps([at, record])}\n".encode())
        while data:
            data = data[write(channel, data) :]

    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        code = compile(program, "program.py", "exec", dont_inherit=True)
    except BaseException as error:
        line = error.lineno if isinstance(error, SyntaxError) else 0
        text = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        report(-1, {"unparsed": text, "line": line or 0})
        leave(0)
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        report(-1, error_of(error))
        leave(0)
    report(-1, {"ran": True})
    for at, (kind, source) in enumerate(checks):
        report(at, check(kind, source, module.__dict__))
    leave(0)


if __name__ == "__main__":
    run()
