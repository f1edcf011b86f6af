"""`uni-agent config`: a recipe's settings."""

from __future__ import annotations

import json as json_format
from typing import Annotated

from cyclopts import Parameter

from uni_agent.cli.recipe import load_recipe


def config(
    recipe: Annotated[str, Parameter(help="sft, grpo, ppo, evaluate, rollout, or the path of a .py file.")],
    /,
    *,
    toml: Annotated[bool, Parameter(negative=(), help="Write a TOML file with every default.")] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print a JSON list.")] = False,
) -> int:
    """List a recipe's settings: key, type, default, meaning."""
    from uni_agent.config import describe, toml_skeleton

    config_class = load_recipe(recipe).config_class
    rows = describe(config_class)
    if json:
        print(json_format.dumps([row._asdict() for row in rows]))
    elif toml:
        print(toml_skeleton(config_class), end="")
    else:
        width = max((len(row.key) for row in rows), default=0)
        for row in rows:
            print(f"{row.key:<{width}}  {row.type} = {row.default}")
            if row.doc:
                print(f"{'':<{width}}    {row.doc}")
    return 0
