"""Config: files and flags into one class, every mistake named at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from uni_agent.config import BaseConfig, describe, load_config, to_toml, toml_skeleton
from uni_agent.errors import ConfigError


class Train(BaseConfig):
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    lr: float = 1e-3
    steps: int = Field(10, ge=0)
    """Optimizer updates; 0 means none."""
    optimizer: Literal["adamw", "sgd"] = "adamw"


class Outer(BaseConfig):
    renamed = {"train.rate": "train.learning_rate"}  # noqa: RUF012  # annotated in the base

    name: str = "run"
    flag: bool = False
    size: int = 4
    limit: int | None = None
    note: str | None = None
    tools: tuple[str, ...] = ()
    ratios: list[float] = Field(default_factory=lambda: [0.5])
    rewards: dict[str, float] = Field(default_factory=dict)
    folder: Path = Path("runs")
    train: Train = Train(learning_rate=2e-3)

    @model_validator(mode="after")
    def check(self) -> Outer:
        if self.flag and self.size == 13:
            raise ValueError("flag cannot be set with size = 13; choose one")
        return self


def write(folder: Path, text: str, name: str = "a.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def mistakes(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, argv)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_o03_config_typo_is_named_with_file_key_and_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nlearning_rte = 1e-3\n")
    assert mistakes(["@", path]) == (
        f"{path}: unknown key 'train.learning_rte'; did you mean 'train.learning_rate'?"
    )


def test_o03_right_key_at_the_wrong_level(tmp_path: Path) -> None:
    path = write(tmp_path, "learning_rate = 1e-3\n[train]\nname = 'x'\n")
    text = mistakes(["@", path])
    assert "unknown key 'learning_rate'; did you mean 'train.learning_rate'?" in text
    assert "unknown key 'train.name'; did you mean 'name'?" in text


def test_o03_flag_typos_and_empty_parts() -> None:
    assert mistakes(["--train.lr_=1"]) == "--train.lr_: unknown key 'train.lr_'; did you mean 'train.lr'?"
    assert "--a..b: the key has an empty part" in mistakes(["--a..b=1"])
    assert "did you mean 'train.lr'" in mistakes(["--train..lr", "1"])
    assert "--train: 'train' is a table; set one of --train.learning_rate" in mistakes(["--train", "1"])
    assert mistakes(["--lr", "1"]) == "--lr: unknown key 'lr'; did you mean 'train.lr'?"
    assert mistakes(["--size"]) == "--size: needs a value (int)"
    assert "unexpected argument 'seven'" in mistakes(["--size", "6", "seven"])
    assert "'size.x'" in mistakes(["--size.x", "1"])


def test_o03_all_mistakes_at_once_and_renamed_key(tmp_path: Path) -> None:
    path = write(tmp_path, "sze = 3\nsize = 'big'\n[train]\nrate = 1.0\noptimizer = 'adam'\nsteps = -1\n")
    text = mistakes(["@", path, "--train.lrr", "1", "--flag", "maybe"])
    lines = text.splitlines()
    assert lines[0] == "7 mistakes in the configuration:"
    assert len(lines) == 8
    assert f"{path}: unknown key 'train.rate'; it was renamed to 'train.learning_rate'" in text
    assert "--train.lrr: unknown key 'train.lrr'" in text
    assert "--flag: 'flag' should be a valid boolean, got 'maybe'" in text
    assert f"{path}: 'size' should be a valid integer, got 'big'; write it without quotes" in text
    assert "'train.optimizer' should be 'adamw' or 'sgd', got 'adam'" in text
    assert "'train.steps' should be greater than or equal to 0, got -1" in text


def test_o03_impossible_pair_names_its_source(tmp_path: Path) -> None:
    path = write(tmp_path, "size = 13\n")
    assert mistakes(["@", path, "--flag"]) == f"{path}: flag cannot be set with size = 13; choose one"


@pytest.mark.parametrize("source", ["toml", "flags"])
def test_o04_scalars_have_the_same_type_from_toml_and_flags(tmp_path: Path, source: str) -> None:
    if source == "toml":
        path = write(
            tmp_path,
            'name = "no"\nflag = false\nsize = 8\n[train]\nlr = 1e-5\nsteps = 1e5\nlearning_rate = 1\n',
        )
        argv = ["@", path]
    else:
        argv = [
            "--name",
            "no",
            "--flag",
            "false",
            "--size",
            "8",
            "--train.lr",
            "1e-5",
            "--train.steps",
            "1e5",
            "--train.learning-rate",
            "1",
        ]
    config = load_config(Outer, argv)
    assert (config.train.lr, type(config.train.lr)) == (1e-5, float)
    assert (config.train.learning_rate, type(config.train.learning_rate)) == (1.0, float)
    assert (config.train.steps, type(config.train.steps)) == (100000, int)
    assert config.name == "no"
    assert config.flag is False
    assert (config.size, type(config.size)) == (8, int)


def test_o04_quoted_numbers_and_booleans_in_toml_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path, 'size = "8"\nflag = "false"\nname = 3\n[train]\nlr = true\nsteps = 1.5\n')
    text = mistakes(["@", path])
    assert text.startswith("5 mistakes")
    assert "'train.steps' should be a valid integer, got 1.5" in text


def test_flags_lie_on_top_of_files_and_later_files_on_earlier(tmp_path: Path) -> None:
    first = write(tmp_path, "size = 1\n[train]\nsteps = 1\nlr = 1.0\n")
    second = write(tmp_path, "[train]\nsteps = 2\n", "b.toml")
    config = load_config(Outer, ["--size", "7", "@", first, f"@{second}"])
    assert (config.size, config.train.steps, config.train.lr) == (7, 2, 1.0)
    assert config.train.learning_rate == 1e-3


def test_lists_none_dicts_and_negative_numbers_through_flags() -> None:
    config = load_config(
        Outer,
        [
            "--tools",
            "a, b",
            "--ratios=[1, 2.5]",
            "--limit",
            "none",
            "--rewards.style",
            "-0.5",
            "--note=-x",
            "--flag",
        ],
    )
    assert config.tools == ("a", "b")
    assert config.ratios == [1.0, 2.5]
    assert config.limit is None
    assert config.rewards == {"style": -0.5}
    assert config.note == "-x"
    assert config.flag is True


def test_missing_and_broken_files_are_one_line(tmp_path: Path) -> None:
    assert mistakes(["@", "/nowhere/x.toml"]) == "/nowhere/x.toml: there is no such file"
    path = write(tmp_path, "size = 1\na..b = 1\n")
    assert mistakes(["@", path]).startswith(f"{path}:2: not valid TOML: ")
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in mistakes(["@", str(tmp_path / "c.toml")])
    assert mistakes(["@"]) == "@ must be followed by a TOML file"


def test_missing_required_key() -> None:
    class Needs(BaseConfig):
        model: str

    with pytest.raises(ConfigError, match="configuration: key 'model' is missing \\(str\\)"):
        load_config(Needs, [])


def test_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "99")
    monkeypatch.setenv("PYDANTIC_CONFIG_PLAIN", "1")
    assert load_config(Outer, []).size == 4


words = st.text(st.characters(exclude_categories=["Cs"]))
configs = st.builds(
    Outer,
    note=st.none() | words.filter(lambda text: text.lower() != "none"),
    limit=st.none() | st.integers(-(2**62), 2**62),
    rewards=st.dictionaries(words, st.floats(allow_nan=False)),
    tools=st.lists(words).map(tuple),
    train=st.builds(Train, lr=st.floats(allow_nan=False), steps=st.integers(0, 2**62)),
)


@given(configs)
def test_to_toml_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, config: Outer) -> None:
    path = write(tmp_path_factory.getbasetemp(), to_toml(config))
    assert load_config(Outer, ["@", path]) == config


def test_describe_and_skeleton(tmp_path: Path) -> None:
    rows = {row.key: row for row in describe(Outer)}
    assert rows["train.steps"] == ("train.steps", "int >= 0", "10", "Optimizer updates; 0 means none.")
    assert rows["train.learning_rate"].default == "0.002"  # the table's own default, not the class's
    assert rows["limit"].type == "int | none"
    assert rows["train.optimizer"].type == '"adamw" | "sgd"'
    assert rows["tools"].type == "list[str]"
    assert "train" not in rows
    path = write(tmp_path, toml_skeleton(Outer))
    assert load_config(Outer, ["@", path]) == Outer()


def test_values_beyond_pythons_limits_are_one_line(tmp_path: Path) -> None:
    for text in ("size = " + "1" * 5000, "size = " + "[" * 5000 + "]" * 5000):
        path = write(tmp_path, text)
        said = mistakes(["@", path])
        assert said.startswith(f"{path}: cannot be read: ")
        assert "\n" not in said
    assert mistakes(["--size=" + "1" * 5000]).startswith("--size: 'size' should be a valid integer")
