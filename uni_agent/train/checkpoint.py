"""Checkpoints that are complete or not there: folders `step_<number>` with a manifest.

A save writes into a temporary folder, syncs it, writes the manifest (sizes and sha256) last and
renames the folder; older ones are removed only after that. What is inside is the learner's business
(`write`); beside it stands any JSON state of the recipe. The best checkpoint lives in `best/`, under
the same rules.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uni_agent.errors import CheckpointError, UsageError

_LOG = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_STATE = "state.json"
_PREFIX = "step_"
_TEMPORARY = ".saving_"
_REPLACED = ".replaced_"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `learner` is the folder that `write` filled, `state` the recipe's JSON."""

    step: int
    path: Path
    state: Mapping[str, Any]
    score: float | None = None

    @property
    def learner(self) -> Path:
        """The folder to hand to `Learner.load`."""
        return self.path / "learner"


class Checkpoints:
    """The checkpoints of one run, in one folder; the newest `keep` are kept, and the best."""

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"keep is {keep}; expected at least 1 checkpoint to keep")
        self.path = Path(path)
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint of `step`: `write(folder)` the learner, `state` as JSON.

        If it fails or is killed on the way, the checkpoints before it are as they were.
        """
        final = _save(self.path, step, write, state, score=None)
        for old in sorted(_numbered(self.path))[: -self.keep]:
            # What was skipped as broken counts too: it is older than a complete one.
            if old < step:
                shutil.rmtree(self.path / f"{_PREFIX}{old}")
        return final

    def save_best(
        self, step: int, write: Callable[[Path], None], state: Mapping[str, Any], *, score: float
    ) -> bool:
        """Keep this one if its score is higher than that of the best so far; say whether it was."""
        before = self.best()
        if before is not None and before.score is not None and score <= before.score:
            return False
        folder = self.path / "best"
        _save(folder, step, write, state, score=score)
        for old in _numbered(folder):
            if old != step:
                shutil.rmtree(folder / f"{_PREFIX}{old}")
        return True

    def latest(self) -> Checkpoint | None:
        """The complete checkpoint of the highest step number; None when none was ever finished.

        Incomplete ones are skipped with a warning. Raises CheckpointError when there are
        checkpoints and none is complete, so that a run never silently begins again at 0.
        """
        broken: list[str] = []
        for step in sorted(_numbered(self.path), reverse=True):
            try:
                return self.read(step)
            except CheckpointError as error:
                _LOG.warning("checkpoint skipped: %s", error)
                broken.append(f"{_PREFIX}{step}")
        if broken:
            raise CheckpointError(
                f"none of the checkpoints in {self.path} is complete ({', '.join(broken)}); "
                "remove the folder to begin again at step 0, or point to another run"
            )
        return None

    def resumed(self) -> Checkpoint:
        """As `latest`, for a run that is to go on: none at all is a CheckpointError too, not step 0."""
        found = self.latest()
        if found is None:
            raise CheckpointError(
                f"{self.path} holds no finished checkpoint, so there is nothing to go on from; begin a new "
                "run, under another name"
            )
        return found

    def read(self, step: int) -> Checkpoint:
        """Check one checkpoint, file by file. Raises CheckpointError."""
        return _read(self.path / f"{_PREFIX}{step}", step)

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest score, or None."""
        found: list[Checkpoint] = []
        for step in _numbered(self.path / "best"):
            try:
                found.append(_read(self.path / "best" / f"{_PREFIX}{step}", step))
            except CheckpointError as error:
                _LOG.warning("checkpoint skipped: %s", error)
        return max(found, key=lambda c: (c.score or 0.0, -c.step), default=None)


def _numbered(path: Path) -> list[int]:
    """The step numbers of the folders `step_<number>`, in no order."""
    if not path.is_dir():
        return []
    _recover(path)
    names = [entry.name for entry in path.iterdir() if entry.is_dir() and entry.name.startswith(_PREFIX)]
    digits = [name.removeprefix(_PREFIX) for name in names]
    return [int(text) for text in digits if text.isdecimal() and str(int(text)) == text]


def _recover(folder: Path) -> None:
    """Put a folder back that was moved aside when the process died before its successor stood."""
    for aside in folder.glob(f"{_REPLACED}*"):
        final = folder / aside.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def _save(
    folder: Path, step: int, write: Callable[[Path], None], state: Mapping[str, Any], *, score: float | None
) -> Path:
    if step < 0:
        raise UsageError(f"checkpoint step is {step}; expected 0 or more")
    folder.mkdir(parents=True, exist_ok=True)
    _recover(folder)
    for left in folder.iterdir():
        if left.name.startswith(_TEMPORARY):
            shutil.rmtree(left)
    final = folder / f"{_PREFIX}{step}"
    temporary = folder / f"{_TEMPORARY}{step}"
    (temporary / "learner").mkdir(parents=True)
    try:
        write(temporary / "learner")
        (temporary / _STATE).write_text(json.dumps(dict(state)))
        _write_manifest(temporary, step, score)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _move_in(temporary, final)
    return final


def _write_manifest(folder: Path, step: int, score: float | None) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    for path in files:
        _sync(path)
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({"step": step, "score": score, "files": listed}, indent=1))
    _sync(manifest)
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(directory)


def _move_in(temporary: Path, final: Path) -> None:
    """Rename; an older folder of the same step is moved aside first and removed last."""
    aside = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    _sync(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _read(path: Path, step: int) -> Checkpoint:
    manifest_path = path / _MANIFEST
    if not manifest_path.is_file():
        raise CheckpointError(f"{path} has no {_MANIFEST}: it is missing or was not finished")
    try:
        manifest = json.loads(manifest_path.read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        found_step, score = int(manifest["step"]), manifest["score"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{manifest_path} is not a manifest that this program wrote: {error}"
        ) from error
    if found_step != step:
        raise CheckpointError(f"{manifest_path} says step {found_step} in a folder named {path.name}")
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} lacks {name}, which its manifest lists")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes; its manifest says {size}")
        if _sha256(file) != digest:
            raise CheckpointError(f"{file} is corrupt: its sha256 is not the one in the manifest")
    if _STATE not in expected:
        raise CheckpointError(f"{manifest_path} does not list {_STATE}")
    return Checkpoint(step, path, json.loads((path / _STATE).read_text()), score)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
