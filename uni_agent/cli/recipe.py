"""Find a recipe and run it: what `train`, `eval`, `run` and `config` share.

A recipe is a module with `Config` (a BaseConfig), `plan(config)` (what it is going to do, as names
and values) and `run(config)` (does it, blocks, and returns the summary). Shipped ones have names;
others are files.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from uni_agent.config import BaseConfig, load_config, to_toml
from uni_agent.errors import MissingDependencyError, UnknownNameError, UsageError
from uni_agent.track import plain_json

RECIPES = ("sft", "grpo", "ppo", "evaluate", "rollout")

Plan = Callable[[Any], Mapping[str, object]]

_EXTRA_OF = {
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "tokenizers": "train",
    "gguf": "train",
    "ray": "ray",
    "vllm": "vllm",
    "mcp": "mcp",
    "starlette": "view",
    "uvicorn": "view",
    "wandb": "track",
    "tensorboard": "track",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A loaded recipe."""

    name: str
    config_class: type[BaseConfig]
    plan: Plan
    run: Plan


def load_recipe(name: str) -> Recipe:
    """Import a recipe by its shipped name or the path of a .py file.

    Modules beside the file and in the current folder (a world of the user's own) become importable.
    Raises UnknownNameError, UsageError, MissingDependencyError.
    """
    _make_importable(Path.cwd())
    with _missing_packages_named():
        if name.endswith(".py"):
            module = _import_file(Path(name))
        elif name in RECIPES:
            module = importlib.import_module(f"uni_agent.recipes.{name}")
        else:
            raise UnknownNameError("recipe", name, [*RECIPES, "FILE.py"])
    parts = vars(module)
    lacking = [part for part in ("Config", "plan", "run") if part not in parts]
    if lacking:
        raise UsageError(f"recipe {name} has no {', '.join(lacking)}; a recipe needs Config, plan and run")
    config_class: object = parts["Config"]
    if not (isinstance(config_class, type) and issubclass(config_class, BaseConfig)):
        raise UsageError(f"recipe {name}: Config is no uni_agent.config.BaseConfig")
    return Recipe(name, config_class, cast("Plan", parts["plan"]), cast("Plan", parts["run"]))


def run_recipe(
    recipe: Recipe, settings: Sequence[str], *, dry_run: bool, resume: Path | None, as_json: bool
) -> int:
    """Resolve the config, then show the plan or run; as JSON, only the result is on stdout."""
    config = load_config(recipe.config_class, _with_resume(recipe, settings, resume))
    if dry_run:
        plan = recipe.plan(config)
        if as_json:
            print(json.dumps({"config": config.model_dump(mode="json"), "plan": plan}, default=str))
        else:
            print(f"# {recipe.name}: the resolved config\n{to_toml(config)}\n# the plan")
            for key, value in plan.items():
                print(f"#   {key}: {value}")
        return 0
    if not as_json:
        with _missing_packages_named():
            recipe.run(config)
        return 0
    with contextlib.redirect_stdout(sys.stderr), _missing_packages_named():
        summary = recipe.run(config)
    print(json.dumps(plain_json(summary), allow_nan=False))
    return 0


def _with_resume(recipe: Recipe, settings: Sequence[str], resume: Path | None) -> list[str]:
    """Lay the run's own config under the settings, and tell the recipe where to go on."""
    if resume is None:
        return list(settings)
    if "resume" not in recipe.config_class.model_fields:
        raise UsageError(f"recipe {recipe.name} cannot resume (its Config has no key `resume`)")
    saved = resume / "config.toml"
    if not saved.is_file():
        raise UsageError(f"{resume} is not a run directory (it has no config.toml); nothing to resume")
    return ["@", str(saved), *settings, f"--resume={resume}"]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no recipe file {path}")
    _make_importable(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pydantic looks annotations up there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UsageError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextlib.contextmanager
def _missing_packages_named() -> Generator[None]:
    """Turn the failed import of an optional package into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        raise MissingDependencyError(
            f"{package} is not installed; get it with: pip install 'uni-agent-rl[{_EXTRA_OF[package]}]'"
        ) from error
