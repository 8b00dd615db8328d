"""`vla-rl check` finds what a run would refuse, as far as files, names and numbers show it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.main import app
from vla_rl.plugins.models.openvla.locate import BUILTIN

SPEC = """\
name: toy
plugins: []
model: {type: openvla_oft, checkpoint: "builtin:tabletop"}
env: {type: tabletop, num_envs: 8}
rollout: {chunk: 4, episodes: 8, group_size: 8}
algorithm: {type: grpo}
placement: {type: collocated}
runtime: {backend: local}
train: {steps: 1, lr: 1e-4, micro_batch: 8}
hooks: []
"""
needs_libero = pytest.mark.skipif(find_spec("libero") is None, reason="needs pip install -e '.[libero]'")
needs_maniskill = pytest.mark.skipif(find_spec("mani_skill") is None, reason="needs pip install -e '.[maniskill]'")
GYM = "{type: gymnasium, id: Pendulum-v1, instruction: swing up, success: terminated, num_envs: 8}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(text: str, *overrides: str) -> tuple[int, str]:
    Path("spec.yaml").write_text(text)
    result = CliRunner().invoke(app, ["check", "spec.yaml", *overrides])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def changed(old: str, new: str) -> str:
    assert SPEC.count(old) == 1
    return SPEC.replace(old, new)


def test_a_good_spec_is_ok():
    assert check(SPEC)[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"builtin:tabletop"', "/nowhere", "spec.yaml:3: model.checkpoint: checkpoint '/nowhere' is not a folder"),
        ('"builtin:tabletop"', "builtin:table", "spec.yaml:3: model.checkpoint: no built-in checkpoint 'builtin:table'"),
        ('tabletop"}', 'tabletop", unnorm_key: x}', "spec.yaml:3: model.unnorm_key: no statistics 'x' in"),
        ('tabletop"}', 'tabletop", head: l1}', "has no action_head--*_checkpoint.pt, which `head: l1` needs"),
        ("openvla_oft", "openvla", "was trained with parallel decoding, openvla has autoregressive decoding"),
        ("chunk: 4", "chunk: 8", "spec.yaml:3: model.checkpoint: .*was trained for chunks of 4 actions, the spec asks for 8"),
        ("{type: collocated}", "{type: collocated, workers: 16}", "spec.yaml:7: placement: 8 envs cannot be shared evenly by 16 workers"),
        ("{type: collocated}", "{type: collocated, devices: 0-99999}", "spec.yaml:7: placement: placement.devices: device 99999 is needed"),
        ("{type: collocated}", "{type: collocated, devices: 'cuda:0'}", "spec.yaml:7: placement: placement.devices: no node is named 'cuda'"),
        ("local}", "local, require: cuda}", "spec.yaml:8: runtime.require: cuda is required, and there is no GPU"),
        ("num_envs: 8", "num_envs: 8, python: /nowhere", "spec.yaml:4: env.python: /nowhere is not an interpreter"),
        ("group_size: 8", "group_size: 1", "spec.yaml:5: rollout.group_size: algorithm 'grpo' compares trajectories"),
        ("lr: 1e-4", "lr: 1e-4, value_lr: 0.1", "spec.yaml:9: train.value_lr: 0.1 is for a critic"),
        ("{type: tabletop, num_envs: 8}", GYM.replace("Pendulum", "Pendulm"), "spec.yaml:4: env.id: no gymnasium environment 'Pendulm-v1'; did you mean 'Pendulum-v1'"),
        ("{type: tabletop, num_envs: 8}", GYM.replace("num_envs", "imports: [nowhere], num_envs"), "spec.yaml:4: env.imports: imports: no module named 'nowhere'"),
        ("{type: tabletop, num_envs: 8}", GYM.replace("num_envs", "wrappers: [{name: Frame}], num_envs"), "spec.yaml:4: env.wrappers.0.name: no wrapper 'Frame'"),
        pytest.param("type: tabletop", "type: libero, suite: libero_gaol", "spec.yaml:4: env.suite: no LIBERO suite 'libero_gaol'; did you mean 'libero_goal'", marks=needs_libero),
        pytest.param("type: tabletop", "type: libero, suite: libero_goal, tasks: [10]", "spec.yaml:4: env.tasks: libero_goal has tasks 0 to 9; asked for 10", marks=needs_libero),
        pytest.param("type: tabletop", "type: libero, suites: {libero_goal: [x]}", "spec.yaml:4: env.suites.libero_goal: libero_goal has no task 'x'", marks=needs_libero),
        pytest.param("type: tabletop", "type: maniskill, task: PickCub-v1", "spec.yaml:4: env.task: no ManiSkill task 'PickCub-v1'; did you mean 'PickCube-v1'", marks=needs_maniskill),
        ("{type: tabletop, num_envs: 8}", "{type: robotwin, tasks: place_shoe, num_envs: 8}", "spec.yaml:4: env: RoboTwin's assets are not there"),
        ("hooks: []", "imitation: {steps: 1, lr: 1e-3, data: {type: lerobot, folder: nope}}", "spec.yaml:10: imitation.data.folder: nope does not exist; give the folder of a LeRobot data set"),
        ("hooks: []", "imitation: {steps: 1, lr: 1e-3, data: {type: libero_hdf5, folder: nope}}", "spec.yaml:10: imitation.data.folder: nope is not a folder; give the one that holds the files TASK_demo.hdf5"),
    ],
)  # fmt: skip
def test_what_a_run_would_refuse(old, new, message, monkeypatch):
    monkeypatch.delenv("ROBOTWIN_ASSETS_ROOT", raising=False)
    monkeypatch.delenv("ASSETS_PATH", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    text = changed(old, new)
    if "type: tabletop" not in text:  # a model that takes any simulator
        text = text.replace('checkpoint: "builtin:tabletop"', "preset: tiny")
    code, said = check(text)
    assert code == 2
    start, _, end = message.partition(".*")
    assert start in said and end in said


def test_everything_at_once():
    text = changed('"builtin:tabletop"', "/nowhere").replace("{type: collocated}", "{type: collocated, workers: 16}")
    code, said = check(text.replace("lr: 1e-4", "lr: 1e-4, value_lr: 0.1"), "env.python=/nope")
    places = [line.split(": ")[0] for line in said.splitlines()]
    assert code == 2 and places == ["spec.yaml:3", "spec.yaml:7", "spec.yaml:9", "override", "override"]


def damaged(folder: Path, file: str, damage: str) -> Path:
    """A copy of the built-in checkpoint with a file of it damaged."""
    copy = folder / "model"
    shutil.copytree(BUILTIN / "tabletop", copy)
    content = (copy / file).read_bytes()
    if damage == "gone":
        (copy / file).unlink()
    else:
        (copy / file).write_bytes(content[: len(content) // 2])
    return copy


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model.safetensors", "gone", "is not a complete checkpoint: it has no model.safetensors"),
        ("model.safetensors", "cut", "it ends too early, as after a download that was cut off"),
        ("config.json", "gone", "is not a complete checkpoint: it has no config.json"),
        ("config.json", "cut", "cannot read"),
        ("tokenizer.json", "gone", "is not a complete checkpoint: it has no tokenizer.json"),
        ("dataset_statistics.json", "cut", "cannot read"),
    ],
)
def test_a_damaged_checkpoint(folder, file, damage, message):
    code, said = check(changed("builtin:tabletop", str(damaged(folder, file, damage))))
    assert code == 2 and said.startswith("spec.yaml:3: model.checkpoint: ") and message in said


def test_commands_of_a_remedy_stand_alone(folder):
    copy = damaged(folder, "tokenizer.json", "gone")
    (copy / "tokenizer.model").touch()
    code, said = check(changed("builtin:tabletop", str(copy)))
    problem, *commands = said.splitlines()
    assert code == 2 and problem.endswith("write tokenizer.json next to it:")
    assert commands[0] == "    pip install sentencepiece protobuf"
    program, flag, source = shlex.split(commands[1])
    assert (program, flag) == (sys.executable, "-c")
    compile(source, "remedy", "exec")


def test_a_checkpoint_of_pi0(folder):
    (folder / "pi0").mkdir()
    (folder / "pi0" / "config.json").write_text(json.dumps({"type": "pi0", "chunk_size": 3}))
    text = changed('{type: openvla_oft, checkpoint: "builtin:tabletop"}', "{type: pi0, checkpoint: pi0}")
    assert "model.checkpoint: pi0 was trained for chunks of 3 actions, the spec asks for 4" in check(text)[1]
    assert "pi0 is not a complete checkpoint: it has no model.safetensors" in check(text, "rollout.chunk=3")[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "from vla_rl import hookimpl\n@hookimpl\ndef on_updat_end(step): ...\n",
            "spec.yaml:2: plugins.0: plugin 'FOLDER/p.py', hook 'on_updat_end' (FOLDER/p.py:2): unknown hook",
        ),
        (
            "from vla_rl import hookimpl\n@hookimpl\ndef on_update_end(stp): ...\n",
            "spec.yaml:2: plugins.0: plugin 'FOLDER/p.py', hook 'on_update_end' (FOLDER/p.py:2): unknown argument 'stp'",
        ),
        (
            "def on_update_end(step): ...\n",
            "spec.yaml:2: plugins.0: plugin 'FOLDER/p.py', hook 'on_update_end' (FOLDER/p.py:1): nothing calls it",
        ),
        ("import sys\n\nsys.exit(3)\n", "FOLDER/p.py:3: SystemExit: 3; it must not end the process"),
    ],
)
def test_a_module_of_plugins_that_cannot_serve(folder, source, message):
    (folder / "p.py").write_text(source)
    code, said = check(changed("plugins: []", "plugins: [p.py]"))
    assert code == 2 and message.replace("FOLDER", str(folder)) in said


def test_a_misspelt_event_of_a_hook_plugin(folder):
    (folder / "p.py").write_text(
        "import attrs\nfrom vla_rl import HookPlugin\n@attrs.frozen\nclass C: ...\nclass L:\n  def on_updat_end(self): ...\n"
        "vla_rl_plugins = {'hook': {'l': HookPlugin(config=C, build=lambda c: L(), summary='')}}\n"
    )
    code, said = check(changed("plugins: []", "plugins: [p.py]"), "hooks=[{type: l}]")
    assert code == 2
    assert f"override: hooks: plugin 'l', hook 'on_updat_end' ({folder}/p.py:6): no such event; did you mean" in said


def test_a_run_refuses_the_same_with_the_same_words():
    text = changed("{type: collocated}", "{type: collocated, workers: 16}")
    code, said = check(text)
    result = CliRunner().invoke(app, ["run", "spec.yaml"])
    assert (result.exit_code, result.output) == (code, said)
    assert not Path("runs").exists()


def test_another_machine():
    spec = changed("{backend: local}", "{backend: ray, require: cuda}").replace("num_envs: 8", "num_envs: 12")
    spec = spec.replace("episodes: 8, group_size: 8", "episodes: 12, group_size: 12")
    assert check(spec, "--devices", "4")[0] == 0
    status, said = check(spec, "--devices", "8")
    assert status == 2 and "spec.yaml:7: placement: 12 envs" in said
    status, said = check(spec, "--devices", "0")
    assert status == 2 and "runtime.require: cuda is required, and there is no GPU" in said
    status, said = check(spec, "--devices", "4", "--cpus", "2")
    assert status == 2 and "spec.yaml:7: placement: " in said
    assert vla_rl.check("spec.yaml", devices=4).env.num_envs == 12


def test_the_memory_of_gpus():
    spec = changed("{backend: local}", "{backend: ray}").replace("micro_batch: 8", "micro_batch: 1")
    status, said = check(spec, "--devices", "1", "--gpu-memory", "80")
    assert status == 0 and re.search(r"memory of GPUs: 0\.\d of 80\.0 GiB on the fullest, in its ", said)
    status, said = check(spec, "--devices", "1", "--gpu-memory", "0.1")
    assert status == 2 and "train.micro_batch: this run does not fit: a GPU needs 0." in said
    assert "0.5 GiB  CUDA context" in said and "no key helps" in said
    assert "memory of GPUs" not in check(spec, "--devices", "0")[1]
    with pytest.raises(vla_rl.UserError, match="this run does not fit"):
        vla_rl.check("spec.yaml", devices=1, gpu_memory=0.1)


def test_memory_that_cannot_be_predicted_is_said():
    text = changed("{backend: local}", "{backend: ray}").replace("type: tabletop", "type: scripted")
    text = text.replace("plugins: []", "plugins: [vla_rl.testing.scripted]").replace(", checkpoint: ", ", preset: ")
    text = text.replace("builtin:tabletop", "tiny")
    status, said = check(text, "--devices", "1", "--gpu-memory", "80")
    assert status == 0 and "memory of GPUs: not checked (nothing is known of env 'scripted'" in said
