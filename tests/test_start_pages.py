"""The pages of docs/start work as they stand there: files, specs, placements and commands."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from vla_rl import UserError, check, clone, known_checkpoints, list_plugins, load_spec, report, run
from vla_rl.cli.main import app

ROOT = Path(__file__).parents[1]
START = ROOT / "docs" / "start"
README = (ROOT / "README.md").read_text()
TUTORIAL = (START / "your-model-and-simulator.md").read_text()
PAGES = [TUTORIAL, (START / "README.md").read_text()]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TUTORIAL, flags=re.DOTALL)
FILES = {name[1]: text for _, text in BLOCKS if (name := re.match(r"# (\w+\.\w+)\n", text))}
PLACEMENTS = [text for language, text in BLOCKS if language == "yaml" and text.startswith("placement:")]
PUBLIC = re.compile(r"vla_rl(\.(toolkit|testing)(\..+)?)?")
MODULES = [name.removesuffix(".py") for name in FILES if name.endswith(".py")]
SHORT = [
    "imitation.expert.episodes=8",
    "imitation.steps=4",
    "imitation.batch=16",
    "train.steps=2",
    "train.micro_batch=16",
    "rollout.episodes=16",
    "train.global_batch=16",
    "eval={every: 2, episodes_per_task: 4}",
    "env={type: my_env, num_envs: 8, processes: {apart: false}}",
    "runtime.backend=local",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's folder, as the working folder and on the path of imports."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def commands() -> list[list[str]]:
    """Every `vla-rl ...` line of both pages, as its words."""
    lines = [line for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] == "vla-rl"]


def test_every_block_is_checked_here():
    assert sorted(FILES) == [
        "check_my_model.py", "my.yaml", "my_env.py", "my_model.py", "network.py", "table.py"
    ]  # fmt: skip
    assert len(PLACEMENTS) == 4
    assert {language for language, _ in BLOCKS} == {"python", "yaml", "sh"}
    assert sum(language in ("python", "yaml") for language, _ in BLOCKS) == len(FILES) + len(PLACEMENTS)


def test_the_plugins_import_public_names_only():
    for text in FILES.values():
        if text is FILES["my.yaml"]:
            continue
        for node in ast.walk(ast.parse(text)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert module is None or not module.startswith("vla_rl") or PUBLIC.fullmatch(module), module


def test_the_simulator_keeps_to_the_contract(project):
    result = invoked("check-env", "my_env", "--plugin", "my_env.py", "--seconds", "10")
    assert result.exit_code == 0, result.output


def test_the_model_keeps_to_the_contract(project):
    runpy.run_path(str(project / "check_my_model.py"))


def test_the_project_is_cloned_trained_and_reported(project):
    cloned = clone(load_spec(project / "my.yaml", SHORT), project / "runs" / "my-robot-sft")
    assert cloned.results["success"]["n"] == 8
    weights = project / "runs" / "my-robot-sft" / "checkpoints" / "last" / "model"
    assert (weights / "model.safetensors").exists() and (weights / "rl.pt").exists()
    spec = load_spec(project / "my.yaml", [*SHORT, f"model.checkpoint={weights}"])
    trained = run(spec, project / "runs" / "my-robot")
    assert trained.results["success_before"]["rate"] == cloned.results["success"]["rate"]
    assert trained.results["steps"] == 2 and set(trained.results["tasks_before"]) == {"red", "blue"}
    page = report(project / "runs" / "my-robot").read_text()
    assert page.count('class="rate before"') == 3 and "reach the red mark" in page


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_are_right_for_the_machines_that_the_page_names(project, placement):
    devices = 1 if "workers: 1" in placement else 8
    check("my.yaml", overrides=overrides(placement), devices=devices)
    if devices == 8:
        with pytest.raises(UserError):
            check("my.yaml", overrides=overrides(placement), devices=2)


def overrides(block: str) -> list[str]:
    return [f"{key}={value}" for key, value in re.findall(r"^(\w+): (.*)$", block, flags=re.MULTILINE)]


def test_the_page_checks_a_machine_that_is_elsewhere(project):
    (words,) = [words for words in commands() if "--devices" in words and words[1] == "check"]
    result = invoked(*words[1:])
    assert result.exit_code == 0, result.output
    assert invoked("check", "my.yaml").exit_code == 0


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_there_with_their_options(words):
    """Each is parsed as the command line parses it, and not run."""
    group = get_command(app)
    command = group.get_command(None, words[1])  # type: ignore[attr-defined, arg-type]
    assert command is not None, f"there is no vla-rl {words[1]}"
    command.make_context(words[1], words[2:], resilient_parsing=False)


def test_a_shell_finds_the_files_as_the_page_says(project):
    """The command itself, in a separate process."""
    command = [sys.executable, "-m", "vla_rl.cli.main", "check", "my.yaml"]
    assert "export PYTHONPATH=$PWD" in TUTORIAL
    source = str(START.parents[1] / "src")
    for folders, code in (([source], 2), ([str(project), source], 0)):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert result.returncode == code, result.stdout + result.stderr


def test_the_examples_that_the_start_page_names_are_there():
    names = set(re.findall(r"vla-rl (?:check|run|examples copy) (tabletop_\w+)", PAGES[1]))
    assert names == {"tabletop_grpo"}
    assert all((START.parents[1] / "examples" / f"{name}.yaml").exists() for name in names)


def test_the_readme_shows_the_spec_of_the_quickstart(tmp_path):
    """Six lines that are a whole spec, and say what the example says."""
    (block,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert len(block.splitlines()) == 6
    (tmp_path / "my.yaml").write_text(block)
    shown, example = (yaml.safe_load(text) for text in (block, (ROOT / "examples" / "tabletop_grpo.yaml").read_text()))
    example["train"].pop("checkpoint_every")
    assert shown == {key: example[key] for key in shown}
    assert set(example) - set(shown) == {"seed", "placement", "eval", "hooks"}
    check(tmp_path / "my.yaml")


def test_the_readme_is_short_and_counts_the_plugins():
    """Two minutes to read; `vla-rl plugins` and `vla-rl models` print the numbers."""
    assert len(README.splitlines()) <= 70
    counted = {}
    for kinds, numbers in re.findall(r"^\| ([a-z, ]+) \| ([\d, ]+) \|", README, flags=re.MULTILINE):
        counted |= dict(zip(kinds.split(", "), map(int, numbers.split(", ")), strict=True))
    own = [plugin["kind"] for plugin in list_plugins() if plugin["dist"] == "vla-rl"]
    assert {"env", "model", "algorithm", "trainer", "data", "placement", "hook"} == set(counted)
    assert counted == {kind: own.count(kind) for kind in counted}
    assert f"{len(known_checkpoints())} public checkpoints" in README
