"""Specs that come with the package: reachable where there is no clone."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.main import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_package_has_the_examples_of_the_repository():
    files = sorted((ROOT / "examples").glob("*.yaml"))
    assert {file.name: file.read_text() for file in vla_rl.examples()} == {
        file.name: file.read_text() for file in files
    }


def test_an_example_is_found_wherever_one_is():
    result = CliRunner().invoke(app, ["check", "examples/tabletop_grpo.yaml", "runtime.backend=local"])
    assert result.exit_code == 0, result.output
    assert "examples/tabletop_grpo.yaml is not there: taking the one that comes with vla-rl" in result.stderr
    assert "ok: openvla_oft on tabletop (256 envs)" in result.stdout


def test_a_file_that_is_there_wins(elsewhere):
    Path("examples").mkdir()
    Path("examples/tabletop_grpo.yaml").write_text("name: mine")
    result = CliRunner().invoke(app, ["check", "examples/tabletop_grpo.yaml"])
    assert result.exit_code == 2 and "examples/tabletop_grpo.yaml:1: model: required, but missing" in result.output


@pytest.mark.parametrize("name", ["examples/tabletop.yaml", "tabletop_grpo.yaml", "other/tabletop_grpo.yaml"])
def test_another_name_is_told_where_they_are(name):
    result = CliRunner().invoke(app, ["run", name])
    assert result.exit_code == 2
    assert f"{name}: no such file; `vla-rl examples` lists those that come with vla-rl" in result.output


def test_they_are_listed_and_copied(elsewhere):
    lines = CliRunner().invoke(app, ["examples"]).stdout.splitlines()
    assert len(lines) == len(vla_rl.examples())
    assert all(len(line.split("  ", 1)[1].strip()) > 20 for line in lines)
    (line,) = [line for line in lines if line.startswith("examples/tabletop_grpo.yaml ")]
    assert line.endswith("a tiny OpenVLA-OFT from about half success to 96 % on two CPU cores")
    for _ in range(2):
        assert CliRunner().invoke(app, ["examples", "--to", "mine"]).exit_code == 0
    Path("mine/tabletop_grpo.yaml").write_text("name: changed")
    result = CliRunner().invoke(app, ["examples", "--to", "mine"])
    assert result.exit_code == 2 and "is there and is not as it comes" in result.output
    assert Path("mine/tabletop_grpo.yaml").read_text() == "name: changed"
