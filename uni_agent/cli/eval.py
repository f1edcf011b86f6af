"""`uni-agent eval`: run the recipe `evaluate`."""

from __future__ import annotations

from uni_agent.cli.recipe import load_recipe, run_recipe
from uni_agent.cli.train import AsJson, DryRun, Settings


def eval(*settings: Settings, dry_run: DryRun = False, json: AsJson = False) -> int:  # a verb
    """Measure a model on held-out tasks. Example: uni-agent eval --model runs/x/model --num-attempts 4"""
    return run_recipe(load_recipe("evaluate"), settings, dry_run=dry_run, resume=None, as_json=json)
