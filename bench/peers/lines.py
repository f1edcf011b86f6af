"""JSON lines over stdin and stdout: how a bench speaks with the process of an arm.

Standard library only, because it also runs in the peers' environments. A request is
{"op": name, "args": {...}}, the answer {"ok": result} or {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Operation = Callable[..., Any]


def serve(operations: Mapping[str, Operation]) -> None:
    """Answer requests until stdin ends.

    What libraries print goes to stderr: the real stdout is kept for answers alone.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": operations[request["op"]](**request["args"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
