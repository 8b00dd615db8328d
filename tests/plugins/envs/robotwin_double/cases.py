"""Few words for what the tests of RoboTwin do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from robotwin_double import layout

from vla_rl.core.contexts import EnvContext
from vla_rl.plugins.envs.robotwin import plugin
from vla_rl.plugins.envs.robotwin.config import RobotwinConfig, Seeds
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS

TASK = "beat_block_hammer"
FIRST = {"eval": list(STEP_LIMITS).index(TASK) * 1_000_000}
FIRST["train"] = FIRST["eval"] + 500_000
"""Ids of the first states of the task."""
CHUNK = 4
HOME = np.zeros(14, np.float32)
HOME[[6, 13]] = 1.0
"""Where the robot is after a reset: grippers open."""
APIS = ("vector", "classic")

spec = importlib.util.spec_from_file_location("double_scene", layout.FILES / "scene.py")
assert spec is not None and spec.loader is not None
scene = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scene)


def settings(kind: str, robotwin: Any, **changes: Any) -> dict[str, Any]:
    found = robotwin({"vector": "wheel", "classic": "main"}.get(kind, kind))
    return {"tasks": TASK, "seeds": Seeds(train_states=4, eval_states=2)} | found | changes


def make(config: dict[str, Any], num_envs: int = 1, chunk: int = CHUNK) -> Any:
    return plugin.build(RobotwinConfig(**config), EnvContext(num_envs=num_envs, chunk=chunk))


def reset(env: Any, *states: int) -> Any:
    env_ids = np.arange(len(states))
    return env.reset(env_ids, np.array(states), env_ids)


def step(env: Any, *targets: Any, active: Any = None, stop: bool = True) -> Any:
    """The same targets, [C][14], in all envs."""
    actions = np.repeat(np.asarray(targets, np.float32)[None], env.num_envs, 0)
    return env.chunk_step(actions, np.ones(env.num_envs, bool) if active is None else active, stop)


def goal(seed: int) -> Any:
    return scene.goal(seed).astype(np.float32)


def shows(obs: Any, seed: int, env_id: int = 0, robot: Any = HOME) -> bool:
    """Whether the head camera shows this seed's scene."""
    numbers = np.concatenate([scene.goal(seed), robot])
    return np.array_equal(obs.images["head"][env_id], scene.draw_image((240, 320), 10, numbers))


def write(folder: Path, name: str, seeds: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps({TASK: {"success_seeds": seeds}}))
    return file
