"""`.ci/venv`, which make calls: what it says when the machine lacks something."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("sh", "dirname", "df", "awk", "rm", "touch", "cat")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the script in it, and a PATH with the shell's own tools and no Python."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "venv", tmp_path / ".ci" / "venv")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def program(project: Path, name: str, script: str) -> None:
    path = project / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    path.chmod(0o755)


def make_venv(project: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", ".ci/venv"],
        cwd=project,
        env={"PATH": str(project / "bin")},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert not (project / ".venv" / ".installed").exists()
    return done.returncode, done.stderr


def test_no_python_and_an_old_python_are_told_how_to_get_one(project: Path) -> None:
    code, text = make_venv(project)
    assert code == 1
    assert "Python 3.11 to 3.14 is needed; found: none" in text
    program(project, "python3", "echo 3.9")
    code, text = make_venv(project)
    assert code == 1
    assert "found: python3=3.9" in text
    assert "apt-get install python3.11 python3.11-venv" in text


def test_a_missing_venv_module_is_told_how_to_get_it(project: Path) -> None:
    program(project, "python3.12", 'case "$2" in *venv*) exit 1;; esac; echo 3.12')
    code, text = make_venv(project)
    assert code == 1
    assert "python3.12 has no venv module" in text
    assert "apt-get install python3.12-venv" in text


def test_a_full_disk_is_told_before_anything_is_written(project: Path) -> None:
    program(project, "python3.11", "echo 3.11")
    program(project, "df", "printf 'Filesystem 1M Used Available\\nx 9 9 1000 1%% /\\n'")
    code, text = make_venv(project)
    assert code == 1
    assert "1000 MB are free" in text
    assert "4096 MB" in text
    assert not (project / ".venv").exists()


def test_a_failing_pip_stops_the_installation(project: Path) -> None:
    script = 'case "$*" in "-m venv .venv") ' + (
        "/bin/mkdir -p .venv/bin; printf '#!/bin/sh\\nexit 7\\n' > .venv/bin/python; "
        "/bin/chmod +x .venv/bin/python;; *) echo 3.11;; esac"
    )
    program(project, "python3.11", script)
    code, text = make_venv(project)
    assert code == 1
    assert "pip could not install torch" in text
