"""The optional C++ kernels of the local engine: compiled once per machine, then loaded from a cache.

All sources in `kernels/` become one extension module. The cache is `$UNI_AGENT_CACHE/native`, or
`~/.cache/uni_agent/native`, with a file per sources, torch, interpreter, compiler and CPU; processes that
start together compile once. Without a compiler, or after a failed build, the engine runs on plain torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from uni_agent.config.cache import cache_dir
from uni_agent.engines.local.blocked import AttendKernel
from uni_agent.engines.local.sampling import SampleKernel
from uni_agent.errors import ModelError

_log = logging.getLogger(__name__)

_MODULE = "uni_agent_native"
_SOURCES = Path(__file__).parent / "kernels"
# Reassociation lets sums vectorise; NaN and infinity keep their meaning. Not -ffast-math, which at link
# time would also switch off denormal numbers for the whole process.
_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    *("-fassociative-math", "-freciprocal-math"),
)


class NativeLayer(Protocol):
    """A decoder layer with its attention left out; see `kernels/dense.cpp`."""

    def start(self, x: Tensor, added: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor: ...


class Native(AttendKernel, SampleKernel, Protocol):
    """The functions of the extension; what they take and give stands in `kernels/*.h` and `kernels/*.cpp`."""

    def Layer(  # noqa: PLR0917 - by position, as the extension takes it
        self,
        linears: list[tuple[Tensor, Tensor | None]],
        norms: list[Tensor | None],
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        eps: float,
        gelu: bool,
        packed: bool,
        tile: int,
    ) -> NativeLayer: ...

    def add_norm(
        self, x: Tensor, added: Tensor | None, post: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor: ...

    def gated(self, gate_up: Tensor, gelu: bool) -> Tensor: ...

    def norm_rope(  # noqa: PLR0917
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        heads: int,
        kv_heads: int,
        eps: float,
    ) -> None: ...


class _BuildError(Exception):
    """Why there are no kernels, in words for the log and for ModelError."""


def load_native() -> Native | None:
    """The kernels, compiled at first use; None where they cannot be had (the reason is logged once)."""
    loaded = _load()
    return None if isinstance(loaded, _BuildError) else loaded


def require_native() -> Native:
    """The kernels. Raises ModelError with the reason where they cannot be had."""
    loaded = _load()
    if isinstance(loaded, _BuildError):
        raise ModelError(f"the local engine's native kernels are not available: {loaded}")
    return loaded


@functools.cache
def _load() -> Native | _BuildError:
    try:
        return _import(_built(cache_dir() / "native"))
    except _BuildError as error:
        _log.warning("local engine runs without native kernels: %s", error)
        return error


def _built(folder: Path) -> Path:
    """The extension file in `folder`, compiled if it is not there yet."""
    compiler = _compiler()
    target = folder / f"{_MODULE}-{_key(compiler)}.so"
    failed = target.with_suffix(".log")
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists() and not failed.exists():
                _compile(compiler, target, failed)
    except OSError as error:
        raise _BuildError(f"cannot write {folder}: {error}") from error
    if not target.exists():
        raise _BuildError(f"compiling failed before; {failed} says why, delete it to try again")
    return target


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise _BuildError(f"no C++ compiler ({named or 'g++, c++ or clang++'}) on PATH")


def _key(compiler: str) -> str:
    version = _run([compiler, "--version"]).stdout
    cpu = platform.processor() + platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        cpu += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256()
    parts = [torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), compiler, version, cpu, *_FLAGS]
    for part in parts:
        digest.update(f"{part}\0".encode())
    for file in sorted(_SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """One process at a time; the lock of one that dies is freed by the system."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: Path, failed: Path) -> None:
    """Compile all sources as one, link, and move the result to `target` in one step."""
    from torch.utils.cpp_extension import include_paths

    _log.warning("compiling the local engine's native kernels, once (about 30 s), into %s", target.parent)
    includes = [f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    library = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        # in one piece: most of the time goes into torch's headers
        whole, built = Path(name) / "whole.cpp", Path(name) / target.name
        whole.write_text("".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp"))))
        # libgomp is left to the one that torch has loaded: two of them would fight for the cores
        libraries = [f"-L{library}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        done = _run([compiler, "-c", str(whole), "-o", str(whole.with_suffix(".o")), *_FLAGS, abi, *includes])
        if done.returncode == 0:
            done = _run([compiler, "-shared", str(whole.with_suffix(".o")), "-o", str(built), *libraries])
        if done.returncode == 0:
            built.replace(target)
            return
        if done.returncode > 0:  # a compiler that was killed may succeed another time
            failed.write_text(done.stderr)
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise _BuildError(f"compiling failed: {(lines or ['no output'])[0]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _import(path: Path) -> Native:
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    try:
        module: Any = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise _BuildError(f"{path} does not load: {error}; delete it to compile again") from error
    return cast(Native, module)
