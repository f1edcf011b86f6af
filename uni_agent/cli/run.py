"""`uni-agent run`: run the recipe `rollout`."""

from __future__ import annotations

from uni_agent.cli.recipe import load_recipe, run_recipe
from uni_agent.cli.train import AsJson, DryRun, Settings


def run(*settings: Settings, dry_run: DryRun = False, json: AsJson = False) -> int:
    """Run episodes with a model or an HTTP endpoint and keep them. Example: uni-agent run @ my.toml"""
    return run_recipe(load_recipe("rollout"), settings, dry_run=dry_run, resume=None, as_json=json)
