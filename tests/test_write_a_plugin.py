"""The project of docs/how-to/write-a-plugin.md and the pages that it links works as it stands there, and imports the
public names only."""

from __future__ import annotations

import ast
import importlib
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vla_rl import load_spec, run
from vla_rl.cli.main import app
from vla_rl.cli.new_plugin import new_plugin

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"
NAMES = ("add-a-simulator", "add-an-algorithm", "add-a-model", "add-a-hook", "write-a-plugin", "publish-a-plugin")
PAGE = "\n".join((HOW_TO / f"{name}.md").read_text() for name in NAMES)
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", PAGE, flags=re.DOTALL)
FILES = {name[1]: text for _, text in BLOCKS if (name := re.match(r"# (\w+\.\w+)\n", text))}
PYTHON = [text for language, text in BLOCKS if language == "python"]
PUBLIC = re.compile(r"vla_rl(\.(toolkit|testing)(\..+)?)?")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def executed(name: str) -> types.ModuleType:
    """A file of the page as a module, after the block that follows it on the page (the author's test of it)."""
    following = PYTHON[PYTHON.index(FILES[name]) + 1]
    assert not following.startswith("# "), "the block is another file"
    module = types.ModuleType(name.removesuffix(".py"))
    exec(FILES[name], module.__dict__)
    exec(following, module.__dict__ | {"__name__": "__main__"})
    return module


def test_every_block_of_python_is_executed_here():
    files = [text for text in PYTHON if text in FILES.values()]
    assert sorted(FILES) == [
        "all.yaml", "dot.py", "dot.yaml", "gaussian.py", "goal.py", "line.py", "nearer.py", "reinforce.py",
        "sane.py", "spo.py", "still.py",
    ]  # fmt: skip
    # What follows each of them but nearer.py and sane.py, two lines that are added to dot.py, and the noise of a training
    # loss.
    assert len(PYTHON) - len(files) == 9


@pytest.mark.parametrize("name", ["dot.py", "line.py", "reinforce.py", "spo.py", "gaussian.py", "still.py"])
def test_what_the_page_checks_keeps_to_the_contract(name):
    executed(name)


def test_a_simulator_is_checked_by_its_file_and_by_the_command(project, fork_server):
    (project / "dot.py").write_text(FILES["dot.py"] + PYTHON[PYTHON.index(FILES["dot.py"]) + 1])
    done = fork_server.run_python(project / "dot.py", cwd=project)  # absolute: its env processes look for it
    assert (done.returncode, done.stderr) == (0, "")
    (command,) = re.findall("^vla-rl (check-env .*?) *(?:#.*)?$", PAGE, flags=re.MULTILINE)
    result = CliRunner().invoke(app, [*command.split(), "--seconds", "5"])
    assert result.exit_code == 0, result.output


def test_the_hook_says_when_the_goal_is_reached():
    executed("goal.py")


def test_the_noise_of_a_training_loss_is_keyed_by_what_it_is_for():
    (block,) = [text for text in PYTHON if "def training_noise" in text]
    names: dict = {}
    exec(block, names)
    noise, actions = names["training_noise"], np.ones((2, 4, 3), np.float32)
    weight = torch.nn.Parameter(torch.ones(5))
    first = noise(0, actions, weight, actions.shape)
    assert first.dtype == np.float32 and np.array_equal(first, noise(0, actions, weight, actions.shape))
    others = [noise(1, actions, weight, actions.shape), noise(0, 2 * actions, weight, actions.shape)]
    others.append(noise(0, actions, weight + 1e-3, actions.shape))
    assert not any(np.array_equal(first, other) for other in others)


def test_what_the_page_imports_from_the_toolkit_is_there():
    """Also in the running text: `from vla_rl... import a, b`."""
    lines = re.findall(r"from\s+(vla_rl[\w.]*)\s+import\s+([\w, ]+)", PAGE)
    assert ("vla_rl.toolkit.algorithms", "clipped_surrogate, gae, group_advantages, kl_estimate") in lines
    for module, names in lines:
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), (module, name)


def test_the_algorithm_of_a_scaffold_is_written_as_the_page_writes_it(tmp_path):
    """Line by line: its loss is the page's."""
    made = new_plugin("algorithm", "mine", tmp_path / "mine") / "src" / "mine" / "impl.py"
    of_scaffold, of_page = ({line.split("#")[0].strip() for line in text.splitlines()}
                            for text in (made.read_text(), FILES["reinforce.py"]))  # fmt: skip
    shared = of_scaffold & of_page
    assert {
        "valid = rollout.valid.float()",
        "returns = rollout.rewards.sum((0, 2))",
        "log_probs = scores.log_probs.sum(-1)",
        "policy = -(log_probs * batch.advantages * batch.weights).sum()",
        "entropy = (scores.entropy.sum(-1) * batch.weights).sum()",
        "return Loss(total=policy - self.config.entropy_coef * entropy, metrics=metrics)",
    } < shared


@pytest.mark.parametrize("spec", ["dot.yaml", "all.yaml"])
def test_the_specs_are_right(project, spec):
    assert load_spec(project / spec).env.type == "dot"


def test_the_project_trains(project):
    short = [
        "train.steps=4",
        "eval={every: 2, before: false, episodes_per_task: 4}",
        "hooks=[{type: jsonl}, {type: goal, rate: 0}]",
    ]
    plugins = "plugins=[dot.py, reinforce.py, gaussian.py, goal.py, sane.py]"
    results = run(load_spec(project / "all.yaml", [plugins, *short]), project / "run", resume=False).results
    assert results["success"]["n"] == 4 and results["steps"] == 2
    assert results["stop_reason"] == "success reached 0%"
    lines = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss/policy" in line for line in lines) == 2


def test_the_algorithm_of_the_page_is_paid_for_a_distance_that_its_simulator_declares(project):
    """Dot with the two lines that the page adds. No episode succeeds: nothing else tells the members of a group
    apart."""
    (lines,) = [text for text in PYTHON if "EnvInfo(..., " in text]
    declared, reported = re.findall(r"extras=\{.*?\}", lines)
    dot = (
        FILES["dot.py"]
        .replace("tasks=(task,)", f"tasks=(task,), {declared}")
        .replace("ated=done)", f"ated=done, {reported})")
    )
    (project / "dot.py").write_text(dot.replace("< 0.1", "< 0.0"))
    changes = ["plugins=[dot.py, nearer.py]", "algorithm.type=nearer", "rollout={chunk: 1, episodes: 8, group_size: 4}"]
    changes += [
        "env={type: dot, num_envs: 4, processes: {apart: false}}",
        "train={steps: 1, lr: 1.0e-3, micro_batch: 8}",
    ]
    changes += ["runtime.backend=local", "eval={every: 0, before: false}", "hooks=[{type: jsonl}]"]
    norms = []
    for coef in (0.0, 0.1):
        folder = project / f"coef-{coef}"
        run(load_spec(project / "dot.yaml", [*changes, f"algorithm.distance_coef={coef}"]), folder, resume=False)
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        norms += [line["policy/grad_norm"] for line in metrics if "policy/grad_norm" in line]
    assert norms[0] == 0 < norms[1]


def test_the_class_of_the_page_has_the_promised_length():
    promised = re.search(r"## A simulator in (\d+) lines\n", PAGE)
    assert promised is not None and f"The class `Dot` has {promised[1]} lines" in PAGE
    dot = next(node for node in ast.parse(FILES["dot.py"]).body if isinstance(node, ast.ClassDef))
    assert dot.end_lineno is not None and dot.end_lineno - dot.lineno + 1 == int(promised[1])
    assert max(len(line) for text in PYTHON for line in text.splitlines()) <= 120


def test_the_page_imports_public_names_only():
    for text in PYTHON:
        for node in ast.walk(ast.parse(text)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert module is None or not module.startswith("vla_rl") or PUBLIC.fullmatch(module), module
