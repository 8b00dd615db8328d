"""Questions to RoboTwin's vector API, asked of the real runtime and of the double alike. `answers.json` holds what the
real one (runtime wheel 0.1.3, SAPIEN 3.0.3) answered; recorded, in an interpreter that has it, by

    python tests/plugins/envs/robotwin_double/interview.py stack_blocks_two ASSETS answers.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.plugins.envs.robotwin.config import RobotwinConfig
from vla_rl.plugins.envs.robotwin.end_effector import move_to_poses
from vla_rl.plugins.envs.robotwin.installation import Installation, find_installation
from vla_rl.plugins.envs.robotwin.patches import suppress_prints

FILE = Path(__file__).parent / "answers.json"
SEED, OTHER_SEED = 200_000, 200_001
"""Seeds whose objects come to rest and which the expert solves, in both."""
STEP_LIMIT = 10**6


def interview(robotwin: Installation, name: str) -> dict[str, Any]:
    """Return question -> answer, in plain data."""
    robotwin.make_importable()
    with suppress_prints():
        return _of_envs(robotwin, name) | _of_an_object(robotwin, name)


def _of_envs(robotwin: Installation, name: str) -> dict[str, Any]:
    settings = robotwin.task_settings(name) | {"step_lim": STEP_LIMIT}
    venv = robotwin.vector_env()(settings, n_envs=1, env_seeds=[SEED], instruction_type="seen")
    sub = venv.envs[0]
    answers: dict[str, Any] = {"an env has no instruction before its reset": sub.get_instruction() is None}
    answers["reset gives"] = repr(venv.reset(env_idx=[0], env_seeds=[OTHER_SEED]))
    answers["the seed of the scene is ep_num"] = sub.task.ep_num - SEED
    answers["the step limit of the settings holds"] = sub.task.step_lim == STEP_LIMIT
    obs = sub.get_obs()
    answers["an observation"] = _described(obs)
    start = np.array(obs["state"])
    answers["grippers after a reset"] = _rounded(start[[6, 13]])
    answers["state is the joints' last targets"] = bool(np.array_equal(start, _targets(sub.task)))
    placeholders = sub.task.get_info()
    answers["placeholders are such as {A} or {a}"] = all(re.fullmatch(r"\{\w\}", key) for key in placeholders)
    answers["their values"] = sorted({type(value).__name__ for value in placeholders.values()})

    left, right = np.array(start), np.array(start)
    left[:6] += 0.05
    right[7:13] += 0.05
    result = sub.step(np.stack([left, left]))
    answers["a step gives"] = _described(result)
    answers["a chunk of two counts"] = sub.task.take_action_cnt
    moved = np.array(result["obs"]["state"])
    answers["the arm that moves reaches its target"] = _close(moved[:6], left[:6])
    answers["an arm commanded to stay moves by less than 1 mrad"] = _close(moved[7:13], start[7:13])
    answers["and does move"] = bool((moved[7:13] != start[7:13]).any())
    target = np.array(moved)
    target[[6, 13]] = 1.7, -0.5
    target[:6] -= 0.05
    target[7:13] += 0.05
    answers["grippers out of range are cut to"] = _rounded(sub.step(target[None])["obs"]["state"][[6, 13]])
    answers["float32 actions of one chunk"] = _described(sub.step(right[None].astype(np.float32))["reward"])

    sub.task.step_lim = sub.task.take_action_cnt
    answers["at the step limit"] = _flags(sub.step(left[None]))
    answers["at the step limit the count is"] = sub.task.take_action_cnt - sub.task.step_lim
    sub.task.step_lim = STEP_LIMIT
    sub.task.eval_success = True
    before = _targets(sub.task)
    answers["after success"] = _flags(sub.step(right[None]))
    answers["after success nothing moves"] = bool(np.array_equal(before, _targets(sub.task)))
    answers["after success take_action gives"] = repr(sub.task.take_action(right, action_type="qpos"))
    venv.close(clear_cache=True)
    answers["close leaves envs"] = len(venv.envs)
    return answers


def _of_an_object(robotwin: Installation, name: str) -> dict[str, Any]:
    task, arguments = robotwin.create_task(name), robotwin.setup_arguments(name)
    answers: dict[str, Any] = {"get_obs before setup_demo": _error(task.get_obs)}
    task.setup_demo(now_ep_num=SEED, seed=SEED, is_test=True, **arguments)
    answers["a second setup_demo without close_env"] = _error(
        lambda: task.setup_demo(now_ep_num=SEED, seed=SEED, is_test=True, **arguments)
    )
    task.close_env()
    answers["get_obs after close_env"] = _error(task.get_obs) in ("AttributeError", "TypeError")
    draws = []
    for _ in range(2):
        np.random.random(7)  # noqa: NPY002 - the generator that RoboTwin seeds
        task.setup_demo(now_ep_num=SEED, seed=SEED, is_test=True, **arguments)
        draws.append(np.random.random())  # noqa: NPY002
        if len(draws) == 1:
            task.close_env()
    answers["setup_demo seeds NumPy"] = draws[0] == draws[1]
    task.close_env()
    task.setup_demo(now_ep_num=SEED, seed=SEED, is_test=True, **arguments)
    where = np.array([*task.get_arm_pose("left"), 1.0, *task.get_arm_pose("right"), 1.0])
    answers["a pose of an arm"] = [len(task.get_arm_pose("left")), bool(abs(np.linalg.norm(where[3:7]) - 1) < 1e-3)]
    posture = _targets(task)
    up = where + np.eye(16)[2] * 0.05
    answers["arms commanded to be where they are"] = _error(lambda: task.take_action(where, action_type="ee"))
    answers["leaves them there"] = _close(_targets(task), posture)
    answers["one of them, while the other arm moves"] = _error(lambda: task.take_action(up, action_type="ee"))
    answers["the same through the plugin"] = _error(lambda: move_to_poses(task, up))
    answers["a hand commanded to rise is there to 5 mm"] = bool(abs(task.get_arm_pose("left")[2] - up[2]) < 5e-3)
    answers["the other arm stays"] = _close(_targets(task)[7:13], posture[7:13])
    away = where + np.eye(16)[2] * 5
    answers["a pose out of reach"] = _error(lambda: move_to_poses(task, away))
    answers["leaves the hand there"] = bool(abs(task.get_arm_pose("left")[2] - up[2]) < 5e-3)
    task.close_env()
    task.setup_demo(now_ep_num=SEED, seed=SEED, is_test=True, **arguments)
    limits = robotwin.robotwin_yaml("_eval_step_limit")
    answers["the step limit is that of the evaluation"] = task.step_lim == limits[name]
    count = 0
    original = task.scene.step

    def step() -> None:
        nonlocal count
        count += 1
        original()

    task.scene.step = step
    info = task.play_once()
    answers["the expert's physics steps are seen"] = count > 100
    answers["play_once gives"] = sorted(key for key in info if key == "info")
    answers["its objects are those of get_info"] = info["info"] == task.get_info()
    answers["the expert's plan"] = bool(task.plan_success)
    answers["the expert's success"] = bool(task.check_success())
    answers["joints of a side"] = [
        len(task.robot.get_left_arm_jointState()),
        len(task.robot.get_right_arm_jointState()),
    ]
    task.close_env()
    answers["close_env leaves"] = {key: repr(getattr(task, key)) for key in ("robot", "scene", "cameras")}
    error = robotwin.unstable_error()
    answers["the exception of an unstable seed"] = [kind.__name__ for kind in error.__mro__]
    answers["settings of cameras"] = {
        kind: [camera["h"], camera["w"]] for kind, camera in robotwin.robotwin_yaml("_camera_config").items()
    }
    clean = robotwin.robotwin_yaml("demo_clean")
    answers["demo_clean"] = {key: clean[key] for key in ("embodiment", "camera", "domain_randomization", "data_type")}
    answers["an unknown settings file"] = _error(lambda: robotwin.robotwin_yaml("no_such_file"))
    return answers


def _targets(task: Any) -> Any:
    return np.array([*task.robot.get_left_arm_jointState(), *task.robot.get_right_arm_jointState()])


def _described(value: Any) -> Any:
    """Return the types, dtypes and shapes of a value, without its numbers."""
    if isinstance(value, dict):
        return {key: _described(value[key]) for key in sorted(value)}
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _flags(result: dict[str, Any]) -> list[float | bool]:
    return [*(float(result[key][0]) for key in ("reward", "terminated", "truncated")), result["info"]["success"]]


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 3) + 0.0 for value in values]


def _close(values: Any, others: Any) -> bool:
    """Return whether joints [rad] are within 1 mrad."""
    return float(np.abs(values - others).max()) < 1e-3


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as exc:
        return type(exc).__name__
    return "none"


def main(task: str, assets: str, answers: str) -> None:
    config = RobotwinConfig(tasks=task, assets=assets, render="raster", shadows=False)
    text = json.dumps(interview(find_installation(config), task), indent=2, sort_keys=True)
    Path(answers).write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
