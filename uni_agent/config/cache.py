"""Where what is made once per machine is kept: fetched models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "UNI_AGENT_CACHE"


def cache_dir() -> Path:
    """`$UNI_AGENT_CACHE`, else `uni_agent` in the user's cache directory."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "uni_agent"
