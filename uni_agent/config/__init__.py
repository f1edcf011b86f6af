"""Typed configuration: TOML files (`@ file.toml`) and dotted flags (`--train.lr 1e-5`) into one class.

In: a `BaseConfig` subclass and an argument list. Out: a validated, frozen instance, or one
`ConfigError` that lists every mistake at once, each with its file or flag, its full key, and the
nearest valid key. Nothing is printed, no setting is read from the environment, nobody exits.
"""

from uni_agent.config.load import load_config, read_toml
from uni_agent.config.shape import BaseConfig
from uni_agent.config.text import ConfigRow, describe, to_toml, toml_skeleton

__all__ = ["BaseConfig", "ConfigRow", "describe", "load_config", "read_toml", "to_toml", "toml_skeleton"]
