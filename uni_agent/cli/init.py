"""`uni-agent init`: a small project of the user's own."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from uni_agent.errors import UsageError

PROJECT = Path(__file__).parent / "project"
FILES = ("README.md", "tasks.jsonl", "my_env.py", "grpo.toml")


def init(folder: Annotated[Path, Parameter(help="A new or empty folder.")], /) -> int:
    """Write a small working project: tasks, a world (environment, tool, reward), a config."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(PROJECT / name, folder / name)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    print(f"wrote {', '.join(FILES)} to {folder}")
    print(f"next: cd {shlex.quote(str(folder))} && uni-agent train grpo @ grpo.toml --model FOLDER --dry-run")
    return 0
