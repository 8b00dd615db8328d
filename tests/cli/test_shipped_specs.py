"""Specs that come with the package: reachable without a clone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.main import app
from vla_rl.cli.shipped_specs import COLLECTIONS
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.checks.no_effect import without_effect

ROOT = Path(__file__).parents[2]
NAMES = [collection.name for collection in COLLECTIONS]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_the_package_has_the_specs_of_the_repository(name):
    files = sorted((ROOT / name).glob("*.yaml"))
    assert files
    assert {file.name: file.read_text() for file in getattr(vla_rl, name)()} == {
        file.name: file.read_text() for file in files
    }


def short_trials():
    """(Example, overrides) of each short trial with `vla-rl sft` that an example's comment gives."""
    for file in sorted((ROOT / "examples").glob("*.yaml")):
        if found := re.search(r"A short trial:.*\n# (imitation.+)$", file.read_text(), re.MULTILINE):
            yield pytest.param(file, found[1].split(), id=file.stem)


@pytest.mark.parametrize(("file", "overrides"), short_trials())
def test_learning_rates_reach_their_values_in_a_short_trial(file, overrides):
    warnings = without_effect(load_spec(file, overrides), training=True, imitation=True)
    assert not [text for path, text in warnings if path[-1] == "lr_warmup_steps"]


def test_a_name_means_one_spec():
    stems = [file.stem for collection in COLLECTIONS for file in collection.files]
    assert len(stems) == len(set(stems))


@pytest.mark.parametrize("name", ["examples/tabletop_grpo.yaml", "tabletop_grpo.yaml", "tabletop_grpo"])
def test_an_example_is_found_wherever_one_is(name):
    result = CliRunner().invoke(app, ["check", name, "runtime.backend=local"])
    assert result.exit_code == 0, result.output
    assert f"{name}: using the spec that comes with vla-rl, {vla_rl.__path__[0]}" in result.stderr
    assert "ok: openvla_oft on tabletop (256 envs)" in result.stdout


def test_a_file_that_is_there_wins(elsewhere):
    Path("examples").mkdir()
    Path("examples/tabletop_grpo.yaml").write_text("name: mine")
    result = CliRunner().invoke(app, ["check", "examples/tabletop_grpo.yaml"])
    assert result.exit_code == 2 and "examples/tabletop_grpo.yaml:1: model: required, but missing" in result.output


@pytest.mark.parametrize("name", ["examples/tabletop.yaml", "tabletop_grop", "other/tabletop_grpo.yaml"])
def test_another_name_gets_the_folder_of_the_shipped_ones(name):
    result = CliRunner().invoke(app, ["run", name])
    assert result.exit_code == 2
    assert f"{name}: no such file; did you mean 'tabletop_" in result.output
    assert "`vla-rl examples`" in result.output and "list the specs that come with vla-rl" in result.output


@pytest.mark.parametrize("name", NAMES)
def test_they_are_listed(name):
    lines = CliRunner().invoke(app, [name]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [file.stem for file in getattr(vla_rl, name)()]
    assert all(len(line.split("  ", 1)[1].strip()) > 20 for line in lines)


def test_a_listed_spec_has_its_first_sentence():
    lines = CliRunner().invoke(app, ["examples"]).stdout.splitlines()
    (line,) = [line for line in lines if line.split()[0] == "tabletop_grpo"]
    assert line.endswith("a tiny OpenVLA-OFT from about half success to 96 % on two CPU cores")


@pytest.mark.parametrize("name", NAMES)
def test_one_is_shown_as_it_is(name):
    file = getattr(vla_rl, name)()[0]
    assert CliRunner().invoke(app, [name, "show", file.stem]).stdout == file.read_text()
    result = CliRunner().invoke(app, [name, "show", f"{file.stem}s"])
    assert result.exit_code == 2
    assert f"there is no '{file.stem}s' among the {name}; did you mean '{file.stem}'?" in result.output


def test_one_is_copied_and_a_changed_one_stays(elsewhere):
    for name in ("tabletop_grpo", "tabletop_grpo.yaml"):
        assert CliRunner().invoke(app, ["examples", "copy", name]).stdout == "tabletop_grpo.yaml\n"
    Path("tabletop_grpo.yaml").write_text("name: changed")
    result = CliRunner().invoke(app, ["examples", "copy", "tabletop_grpo"])
    assert result.exit_code == 2 and "is there and is not as it comes" in result.output
    assert Path("tabletop_grpo.yaml").read_text() == "name: changed"


def test_all_are_copied_without_a_name(elsewhere):
    lines = CliRunner().invoke(app, ["examples", "copy", "--to", "mine"]).stdout.splitlines()
    assert lines == [f"mine/{file.name}" for file in vla_rl.examples()]


def test_a_misspelt_one_is_not_copied():
    result = CliRunner().invoke(app, ["examples", "copy", "tabletop_grop"])
    assert result.exit_code == 2
    assert "there is no 'tabletop_grop' among the examples; did you mean 'tabletop_grpo'?" in result.output
