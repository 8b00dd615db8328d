from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vla_rl.core.cli.new_plugin import new_plugin
from vla_rl.core.errors import UserError
from vla_rl.core.plugins import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_project_passes_its_own_test(kind: str, tmp_path: Path) -> None:
    project = new_plugin(kind, f"my-{kind}", tmp_path / "project")
    env = os.environ | {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    code = f"import sys, my_{kind}; print(my_{kind}.plugin.summary); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=project, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_entry_point_names_the_plugin(kind: str, tmp_path: Path) -> None:
    project = new_plugin(kind, "two-words", tmp_path / "project")
    metadata = tomllib.loads((project / "pyproject.toml").read_text())
    assert metadata["project"]["name"] == "two-words"
    assert metadata["project"]["entry-points"] == {KINDS[kind].group: {"two_words": "two_words:plugin"}}
    readme = (project / "README.md").read_text()
    assert "type: two_words" in readme
    text = "".join(path.read_text() for path in project.rglob("*") if path.is_file())
    assert "$" not in text
    assert "class TwoWordsConfig" in text


@pytest.mark.parametrize("kind", KINDS)
def test_generated_code_is_tidy(kind: str, tmp_path: Path) -> None:
    project = new_plugin(kind, "tidy", tmp_path / "project")
    command = [sys.executable, "-m", "ruff", "--isolated"]
    options = ["--line-length", "120", str(project)]
    for check in (["check", "--select", "E,F,B,UP"], ["format", "--check"]):
        done = subprocess.run([*command, *check, *options], text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no kind of plugin 'evn'; did you mean 'env'"):
        new_plugin("evn", "x", tmp_path / "x")
    with pytest.raises(UserError, match="'1st env' cannot name a plugin"):
        new_plugin("env", "1st env", tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        new_plugin("env", "x", tmp_path / "full")
    assert not (tmp_path / "x").exists()
