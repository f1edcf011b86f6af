"""`uni-agent train`: run a training recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from uni_agent.cli.recipe import load_recipe, run_recipe

Settings = Annotated[
    str, Parameter(allow_leading_hyphen=True, help="`@ file.toml` and `--dotted.key value` pairs.")
]
DryRun = Annotated[bool, Parameter(negative=(), help="Print the resolved config and the plan, and stop.")]
AsJson = Annotated[bool, Parameter(negative=(), help="Print one JSON object; progress goes to stderr.")]


def train(
    recipe: Annotated[str, Parameter(help="sft, grpo, ppo, or the path of a .py file.")],
    /,
    *settings: Settings,
    dry_run: DryRun = False,
    resume: Annotated[Path | None, Parameter(help="Go on with the run in this directory.")] = None,
    json: AsJson = False,
) -> int:
    """Train a model with a recipe. Example: uni-agent train grpo @ my.toml --steps 50"""
    return run_recipe(load_recipe(recipe), settings, dry_run=dry_run, resume=resume, as_json=json)
