"""Meta-World as a batch of env instances: its tasks and reset states, and one instance."""

from __future__ import annotations

import os
from collections import OrderedDict
from importlib.util import find_spec
from typing import Any

import numpy as np

from vla_rl.core.contexts import EnvContext
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Array, ResetState
from vla_rl.plugins.envs.metaworld.config import ACTION_DIM, MetaWorldConfig, describe_env
from vla_rl.plugins.envs.metaworld.tasks import INSTRUCTIONS
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View, env_factory
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

IDS_PER_TASK, FIRST_TRAIN, EVAL_STATES = 10_000, 1000, 50
"""Ids: 10,000 times the task's number in the official order, plus 0 to 49 for "eval", 1000 to 9999 for "train"."""


def make_env(config: MetaWorldConfig, context: EnvContext) -> SubprocEnvs:
    if find_spec("metaworld") is None:  # fail here, not in an env's process
        raise ModuleNotFoundError("No module named 'metaworld'", name="metaworld")
    os.environ.setdefault("MUJOCO_GL", "egl")
    names = config.task_names
    order = list(INSTRUCTIONS)
    states: dict[str, list[ResetState]] = {"train": [], "eval": []}
    for name in names:
        first = order.index(name) * IDS_PER_TASK
        states["eval"] += [ResetState(id=first + i, task=name) for i in range(EVAL_STATES)]
        states["train"] += [ResetState(id=first + FIRST_TRAIN + i, task=name) for i in range(config.train_states)]
    return SubprocEnvs(describe_env(config), states, env_factory(MetaWorldEnv, config), context, config.processes)


class MetaWorldEnv(SingleEnv):
    """Env instance that builds a task's simulator when it is first needed and keeps the most recently used ones."""

    def __init__(self, config: MetaWorldConfig) -> None:
        self._config = config
        self._scenes: OrderedDict[str, Any] = OrderedDict()

    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode. The state id determines everything; `seed` has no effect."""
        index, number = divmod(state_id, IDS_PER_TASK)
        task = list(INSTRUCTIONS)[index]
        self._scene = self._open_scene(task)
        self._scene.place(derived_seed(0, f"metaworld/{task}", number) % 2**32)

    def step(self, action: Array) -> Outcome:
        dense, success = self._scene.step(action)
        reward = dense if self._config.reward == "dense" else float(success)
        return Outcome(reward, success, terminated=success)

    def render(self) -> View:
        return View(self._scene.images(), self._scene.state())

    def expert_chunk(self, length: int) -> Array:
        """Return the actions that the official scripted policy takes in the next steps if nothing disturbs it."""
        actions = np.zeros((length, ACTION_DIM), np.float32)
        with self._scene.rehearsal():
            for i in range(length):
                actions[i] = self._scene.demonstrate()
                self._scene.step(actions[i])
        return actions

    def close(self) -> None:
        while self._scenes:
            self._scenes.popitem()[1].close()

    def _open_scene(self, task: str) -> Any:
        """Return the simulator of this task."""
        from vla_rl.plugins.envs.metaworld.scene import MetaWorldScene

        if task not in self._scenes:
            while len(self._scenes) >= self._config.keep_tasks:
                self._scenes.popitem(last=False)[1].close()
            self._scenes[task] = MetaWorldScene(task, self._config)
        self._scenes.move_to_end(task)
        return self._scenes[task]
