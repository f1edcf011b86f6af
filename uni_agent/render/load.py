"""Which renderer a model folder has, and its loading.

The name stands in the folder's `renderer.json` or is given; it is never guessed from a model's name,
because fine-tunes of one architecture speak different templates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uni_agent.config.known_models import model_folder
from uni_agent.errors import ModelError, UnknownNameError
from uni_agent.protocols import Renderer
from uni_agent.render.chatml import ChatMLRenderer
from uni_agent.render.package import PackageRenderer, package_renderer_names
from uni_agent.render.template import TemplateRenderer
from uni_agent.render.tokens import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDERER_FILE = "renderer.json"


def renderer_names() -> list[str]:
    """All names that `load_renderer` takes."""
    return ["chatml", "template", *package_renderer_names()]


def load_renderer(
    path: str | Path, *, name: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Renderer:
    """Load the renderer of a model folder.

    `name` overrides the folder's renderer.json (`{"renderer": "qwen3"}`); `tokenizer` saves loading
    it again. Raises ModelError (no folder, no tokenizer, no chat template, no name) and
    UnknownNameError.
    """
    folder = model_folder(path)
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; give the path of a folder on this machine")
    name = name or read_renderer_name(folder)
    if name is None:
        raise ModelError(
            f"{folder} does not say which renderer it speaks; write {RENDERER_FILE} "
            f'{{"renderer": NAME}} there or give a name: {", ".join(renderer_names())}'
        )
    if name not in renderer_names():
        raise UnknownNameError("renderer", name, renderer_names())
    tokenizer = tokenizer or load_tokenizer(folder)
    if name == "chatml":
        return ChatMLRenderer(tokenizer, str(folder))
    if name == "template":
        return TemplateRenderer(tokenizer, str(folder))
    return PackageRenderer(name, tokenizer, str(folder))


def read_renderer_name(folder: Path) -> str | None:
    """The name in a folder's renderer.json, None without the file. Raises ModelError."""
    file = folder / RENDERER_FILE
    if not file.is_file():
        return None
    try:
        found: Any = json.loads(file.read_text())
        name = found["renderer"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ModelError(f'{file} must hold {{"renderer": NAME}}: {problem!r}') from problem
    if not isinstance(name, str):
        raise ModelError(f"{file}: renderer must be a name, got {name!r}")
    return name
