"""Reads and writes inside a sandbox's private folder, whose content is untrusted.

Each part of a path is opened by itself, without following links, so a program inside cannot lead the
owner (often root) out of the folder. Nothing here runs code.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path, PurePosixPath

from uni_agent.errors import SandboxError


def make_folder(parent: Path | None, uid: int | None) -> Path:
    """Make a private folder (mode 0700), owned by the sandbox's user. Raises SandboxError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="uni-agent-sandbox-", dir=parent))
        if uid is not None:
            os.chown(folder, uid, uid)
    except OSError as error:
        raise SandboxError(
            f"cannot make the sandbox's folder: {error}; check TMPDIR and free space"
        ) from error
    return folder


def remove_folder(folder: Path) -> None:
    """Remove the folder and all in it. Raises SandboxError if something stays."""

    def loosen(function: object, path: str, error: object) -> None:
        # code may have taken the rights from its own folders; outside root that stops us too
        os.chmod(Path(path).parent, 0o700)
        if Path(path).is_dir() and not Path(path).is_symlink():
            os.chmod(path, 0o700)
            shutil.rmtree(path)
        else:
            os.unlink(path)

    try:
        shutil.rmtree(folder, onerror=loosen)
    except OSError as error:
        raise SandboxError(f"cannot remove the sandbox's folder {folder}: {error}") from error


def _parts(path: str) -> tuple[str, ...]:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise SandboxError(
            f"path {path!r} is not inside the sandbox's folder; give a relative path without '..'"
        )
    return pure.parts


def _open_parent(folder: Path, parts: tuple[str, ...], *, make: bool, uid: int | None) -> int:
    """Open the folder that holds the last part; the caller closes it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder, flags)
    for part in parts[:-1]:
        try:
            if make:
                try:
                    os.mkdir(part, 0o700, dir_fd=fd)
                except FileExistsError:
                    pass
                else:
                    if uid is not None:
                        os.chown(part, uid, uid, dir_fd=fd, follow_symlinks=False)
            deeper = os.open(part, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def _check_plain(fd: int, path: str) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise SandboxError(f"{path!r} in the sandbox is not a plain file (a link, a folder or a device)")


def read_file(folder: Path, path: str, *, limit_bytes: int) -> bytes:
    """Read a plain file. Raises SandboxError: missing, outside, a link, larger than the limit."""
    parts = _parts(path)
    try:
        parent = _open_parent(folder, parts, make=False, uid=None)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(parts[-1], flags, dir_fd=parent)
        finally:
            os.close(parent)
        with open(fd, "rb") as file:
            _check_plain(fd, path)
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise SandboxError(f"cannot read {path!r} in the sandbox: {error.strerror}") from error
    if len(content) > limit_bytes:
        raise SandboxError(f"{path!r} in the sandbox is larger than the limit of {limit_bytes} bytes")
    return content


def write_file(folder: Path, path: str, content: bytes, *, uid: int | None) -> None:
    """Write a file, making its folders. Raises SandboxError: outside, a link, no space."""
    parts = _parts(path)
    try:
        parent = _open_parent(folder, parts, make=True, uid=uid)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(parts[-1], flags, 0o600, dir_fd=parent)
        finally:
            os.close(parent)
        with open(fd, "wb") as file:
            _check_plain(fd, path)  # before truncating: it may be somebody else's, hard-linked
            file.truncate()
            if uid is not None:
                os.fchown(fd, uid, uid)
            file.write(content)
    except OSError as error:
        raise SandboxError(f"cannot write {path!r} in the sandbox: {error.strerror}") from error
