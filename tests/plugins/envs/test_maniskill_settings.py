"""What the `maniskill` plugin says of settings, tasks, files and drivers before anything is drawn."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fork_server import ForkServer
from vla_rl.core.contexts import CheckContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.maniskill import plugin
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig
from vla_rl.toolkit.envs import vulkan as driver
from vla_rl.toolkit.envs.rendering import require_rendering

if find_spec("mani_skill") is None:
    pytest.skip("needs ManiSkill: pip install -e '.[maniskill]'", allow_module_level=True)

SCRIPT = Path(__file__).parents[3] / "tools" / "install_vulkan.sh"


@pytest.fixture(scope="module")
def vulkan() -> None:
    driver.use_unpacked_driver()
    try:
        require_rendering("vulkan", "maniskill")
    except UserError as exc:
        pytest.skip(str(exc))


def make(**changes: Any) -> Any:
    return plugin.build(ManiSkillConfig(**{"task": "PickCube-v1"} | changes), EnvContext())


@pytest.mark.sim
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "PickCub-v1"}, r"no ManiSkill task 'PickCub-v1'; did you mean 'PickCube-v1'\?"),
        ({"cameras": {"wrist": 64}}, r"'wrist' is not a camera of PickCube-v1.*\n  there are: base_camera"),
        (
            {"task": "StackCube-v1", "cameras": {"hand_camra": 64}},
            r"did you mean 'hand_camera'\?\n  there are: base_camera, hand_camera",
        ),
        ({"control_mode": "pd_ee_delta_poses"}, r"is not a control mode .*; did you mean 'pd_ee_delta_pose'\?"),
        (
            {"task": "PlugCharger-v1", "reward": "dense"},
            "'normalized_dense' is not a reward of PlugCharger-v1 .*\n  there are: none, sparse",
        ),
        (
            {"task": "UnitreeG1Stand-v1"},
            r"has no words for a policy; .*\n  instructions: \{UnitreeG1Stand-v1: pick up the cube\}",
        ),
        (
            {
                "task": "UnitreeG1Stand-v1",
                "instructions": {"UnitreeG1Stand-v1": "stand"},
                "control_mode": "pd_joint_pos",
            },
            "does not say whether it was solved",
        ),
        (
            {"task": "PutCarrotOnPlateInScene-v1"},
            r"needs files .* bridge_v2_real2sim\n  download them with: .* bridge_v2_real2sim -y",
        ),
        (
            {"task": "PickCubeWidowXAI-v1"},
            "asks: 'Robot widowxai has .*\n.*mani_skill.utils.download_asset widowxai -y",
        ),
        (
            {"robot": "panda_wristcm"},
            r"is not a robot for PickCube-v1; did you mean 'panda_wristcam'\?\n  there are: panda, .*panda_wristcam",
        ),
        ({"task": "TwoRobotPickCube-v1", "robot": "panda"}, "'panda' is not a robot for TwoRobotPickCube-v1"),
        ({"backend": "gpu"}, "backend: gpu needs a CUDA device"),
    ],
)
def test_what_a_spec_asks_for_has_to_exist(
    vulkan: None, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mani_skill.utils.assets import DATA_SOURCES

    monkeypatch.setattr(DATA_SOURCES["bridge_v2_real2sim"], "output_dir", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"(?s){message}"):
        make(**changes)


@pytest.mark.sim
def test_preflight_leaves_sapien_out_of_the_process(vulkan: None, fork_server: ForkServer) -> None:
    code = """
import sys
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.maniskill import plugin
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig
if __name__ == "__main__":
    plugin.preflight(ManiSkillConfig(tasks=("PickCube-v1", "PushCube-v1")))
    try:
        plugin.preflight(ManiSkillConfig(task="PickCube-v1", cameras={"base_camra": 64}))
    except UserError as exc:
        print(exc, "sapien" in sys.modules, "mani_skill" in sys.modules)
"""
    done = fork_server.run_python("-c", code, timeout=280, check=True)
    said = "'base_camra' is not a camera of PickCube-v1; did you mean 'base_camera'?\n  there are: base_camera False False\n"
    assert done.stdout == said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "give either task, such as PickCube-v1, or tasks"),
        ({"task": "PickCube-v1", "tasks": ("PushCube-v1",)}, "give either task"),
        ({"tasks": ("PushCube-v1", "PushCube-v1")}, "named twice: PushCube-v1"),
        ({"task": "PickCube-v1", "cameras": {}}, "name at least one camera"),
        ({"task": "PickCube-v1", "cameras": {"base_camera": 4}}, "'base_camera' has 4 pixels; give 8 to 1024"),
        ({"task": "PickCube-v1", "instructions": {"PushCube-v1": "go"}}, "none of the tasks: PickCube-v1"),
        ({"task": "PickCube-v1", "instructions": {"PickCube-v1": " "}}, "instruction of PickCube-v1 is empty"),
    ],
)
def test_settings_are_checked_when_they_are_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ManiSkillConfig(**changes)


def test_numbers_of_an_action_are_known_where_a_panda_arm_acts() -> None:
    assert plugin.action_dim is not None
    assert plugin.action_dim(ManiSkillConfig(task="StackCube-v1")) == 7
    assert (
        plugin.action_dim(ManiSkillConfig(tasks=("StackCube-v1", "PickCube-v1"), control_mode="pd_ee_delta_pos")) == 4
    )
    assert plugin.action_dim(ManiSkillConfig(task="PickCube-v1", robot="panda_wristcam")) == 7
    assert plugin.action_dim(ManiSkillConfig(task="PickCube-v1", robot="fetch")) is None
    assert plugin.action_dim(ManiSkillConfig(task="PushT-v1")) is None
    assert plugin.action_dim(ManiSkillConfig(task="PickCube-v1", control_mode="pd_joint_vel")) is None


@pytest.mark.sim
@pytest.mark.parametrize("mode", ["pd_ee_delta_pose", "pd_ee_delta_pos", "pd_joint_delta_pos", "pd_joint_pos"])
def test_these_numbers_are_right(vulkan: None, mode: str) -> None:
    config = ManiSkillConfig(task="PegInsertionSide-v1", control_mode=mode)
    assert plugin.action_dim is not None
    assert plugin.build(config, EnvContext()).info.action_dim == plugin.action_dim(config)


def test_the_unpacked_driver_is_used_unless_there_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    icd = tmp_path / "vla-rl" / "mesa" / "lvp_icd.json"
    icd.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "NVIDIA", ())
    monkeypatch.setenv("VK_ICD_FILENAMES", "")
    driver.use_unpacked_driver()
    assert os.environ["VK_ICD_FILENAMES"] == "", "there is no driver yet"
    icd.touch()
    monkeypatch.setenv("VK_DRIVER_FILES", "mine.json")
    driver.use_unpacked_driver()
    assert os.environ["VK_ICD_FILENAMES"] == "", "the user chose one"
    monkeypatch.delenv("VK_DRIVER_FILES")
    driver.use_unpacked_driver()
    assert os.environ["VK_ICD_FILENAMES"] == str(icd)


def test_the_script_says_what_is_missing_and_never_fails(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("uname", "grep", "id"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
        (tools / name).symlink_to(found)
    bare = {"PATH": str(tools), "HOME": str(tmp_path)}
    run = partial(subprocess.run, ["/bin/sh", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=True)
    assert "Mesa 24.3 or newer" in run(env=bare).stderr
    content = run(env=bare | {"VK_ICD_FILENAMES": "mine.json"})
    assert content.stdout + content.stderr == "", "the user chose a driver"


TASK_MODULE = """
from mani_skill.envs.tasks import PickCubeEnv
from mani_skill.utils.registration import register_env


@register_env("{name}", max_episode_steps=7)
class TaskOfAnotherPackage(PickCubeEnv):
    def __init__(self, *args, cubes, **kwargs):
        self.cubes = cubes
        super().__init__(*args, **kwargs)
"""


def test_tasks_of_another_package_are_registered_by_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_rl.plugins.envs.maniskill.checks import check_task, registered_tasks

    (tmp_path / "tasks_of_another_package.py").write_text(TASK_MODULE.format(name="OtherPick-v1"))
    monkeypatch.syspath_prepend(tmp_path)
    config = ManiSkillConfig(task="OtherPick-v1", imports=("tasks_of_another_package",))
    assert plugin.check is not None
    plugin.check(config, CheckContext())
    with pytest.raises(ValueError, match="no ManiSkill task 'OtherPick-v1'"):
        plugin.check(ManiSkillConfig(task="OtherPick-v1"), CheckContext())
    assert registered_tasks(config.imports)["OtherPick-v1"].max_episode_steps == 7
    check_task("OtherPick-v1", config.imports)
    with pytest.raises(UserError, match="imports: 'no_such_package' cannot be imported: No module named"):
        registered_tasks(("no_such_package",))


@pytest.mark.sim
def test_a_task_of_another_package_gets_its_arguments_and_keeps_its_resolution(
    vulkan: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vla_rl.plugins.envs.maniskill.env import probe_tasks
    from vla_rl.plugins.envs.maniskill.scene import SimulationDevices

    (tmp_path / "tasks_with_arguments.py").write_text(TASK_MODULE.format(name="ArgumentPick-v1"))
    monkeypatch.syspath_prepend(tmp_path)
    config = ManiSkillConfig(
        task="ArgumentPick-v1",
        imports=("tasks_with_arguments",),
        kwargs={"cubes": 1},
        instructions={"ArgumentPick-v1": "pick up the cube"},
        cameras={"base_camera": None},
        backend="cpu",
    )
    (task,) = probe_tasks(config, SimulationDevices())
    assert task.info.max_steps == 7
    assert task.recipe.cameras == {"base_camera": {"width": 128, "height": 128}}
    assert (task.recipe.imports, task.recipe.kwargs) == (config.imports, config.kwargs)


SPOKEN_TASK = """
from mani_skill.envs.tasks import PickCubeEnv
from mani_skill.utils.registration import register_env


@register_env("SpokenPick-v1", max_episode_steps=7)
class SpokenPick(PickCubeEnv):
    calls = 0

    def evaluate(self):
        self.calls += 1
        text = f"pick up the cube of scene {self._episode_seed[0]}, evaluation {self.calls}"
        return {**super().evaluate(), "language_instruction": [text]}
"""


@pytest.mark.sim
def test_an_instruction_in_the_info_is_the_policys_unless_the_spec_gives_one(
    vulkan: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the present episode, and reading it evaluates the task no further time."""
    (tmp_path / "tasks_that_speak.py").write_text(SPOKEN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"task": "SpokenPick-v1", "imports": ("tasks_that_speak",), "cameras": {"base_camera": 32}}
    zero, on = np.zeros(1, np.int64), np.array([True])

    def hear(env: Any) -> list[str]:
        texts = [env.reset(zero, np.array([state]), zero).instructions[0] for state in (3, 4)]
        result = env.chunk_step(np.zeros((1, 2, len(env.info.action_low)), np.float32), on, True)
        return [*texts, result.obs.instructions[0]]

    env = make(backend="cpu", **settings)
    assert env.info.tasks[0].instruction_varies
    first, second, later = [re.findall(r"\d+", text) for text in hear(env)]
    assert (first[0], second[0], later[0]) == ("3", "4", "4")
    assert int(later[1]) == int(second[1]) + 2, "one evaluation for each action"
    reworded = make(backend="cpu", instructions={"SpokenPick-v1": "fetch it"}, **settings)
    assert not reworded.info.tasks[0].instruction_varies and set(hear(reworded)) == {"fetch it"}
