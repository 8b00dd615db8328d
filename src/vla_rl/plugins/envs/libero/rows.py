"""One simulator row as a gymnasium environment whose step is a whole chunk, and the process it may live in."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from attrs import frozen
from gymnasium import spaces

from vla_rl.core.randomness import derived_seed
from vla_rl.plugins.envs.libero import LiberoConfig
from vla_rl.plugins.envs.libero.expert import Expert, recipe
from vla_rl.plugins.envs.libero.suites import Array, Suite

ACTION_DIM, STATE_DIM = 7, 8
IDS_PER_TASK, FIRST_TRAIN = 1000, 500
"""An id is 1000 times the task's number, plus 0 to 499 for official states or 500 to 999 for drawn ones."""
UNTOUCHED = -1
"""In place of a state id: leave this row as it is."""


class Row(gymnasium.Env[Any, Any]):
    """Row `index` of the batch. Its simulator is built at the first reset, so making a Row is cheap anywhere."""

    def __init__(self, config: LiberoConfig, chunk: int, index: int) -> None:
        self._config, self._chunk, self._index = config, chunk, index
        images: dict[str, spaces.Space[Any]] = {
            name: spaces.Box(0, 255, (size, size, 3), np.uint8) for name, size in config.cameras.items()
        }
        parts = images | {"state": spaces.Box(-np.inf, np.inf, (STATE_DIM,), np.float32)}
        self.observation_space = spaces.Dict(parts)
        flag = spaces.Box(0, 1, (), np.bool_)
        actions = spaces.Box(-np.inf, np.inf, (chunk, ACTION_DIM), np.float32)
        self.action_space = spaces.Dict({"actions": actions, "active": flag, "stop_at_end": flag})
        self._last: dict[str, Array] = {name: np.zeros(space.shape or (), space.dtype) for name, space in parts.items()}
        self._scene: Any = None
        self._expert: Expert | None = None
        self._seeds: dict[int, int] = {}

    @cached_property
    def _suite(self) -> Suite:
        return Suite(self._config.suite)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """`options["state_ids"]`: int64 [rows], of which this row takes its own."""
        state_id = int((options or {})["state_ids"][self._index])
        if state_id != UNTOUCHED:
            index, number = divmod(state_id, IDS_PER_TASK)
            self._enter(index)
            self._expert = None
            if number < FIRST_TRAIN:
                self._place(0, self._suite.initial_states(index)[number])
            else:
                self._place(self._drawn(state_id), None)
            self._look()
        return self._last, {}

    def _place(self, seed: int, state: Array | None) -> None:
        self._scene.place(seed, state, self._config.settle_steps)

    def _drawn(self, state_id: int) -> int:
        """The seed of a train state: a function of the task's name and the number alone."""
        if state_id not in self._seeds:
            purpose, number = f"libero/{self._scene.task.name}", state_id % IDS_PER_TASK
            tries = (derived_seed(0, purpose, number, attempt) % 2**32 for attempt in range(10))
            self._seeds[state_id] = self._scene.calm_seed(tries)
        return self._seeds[state_id]

    def _enter(self, index: int) -> None:
        """Have the simulator of this task."""
        from vla_rl.plugins.envs.libero.scene import Scene

        task = self._suite.tasks[index]
        if self._scene is None or self._scene.task != task:
            self.close()
            self._scene = Scene(task, self._config.cameras, self._config.fast_render)

    def _look(self) -> None:
        self._last = self._scene.images() | {"state": self._scene.state()}

    def step(self, action: Mapping[str, Array]) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Execute a chunk. All that is per action is in the info; the ends of episodes are the caller's business,
        so the two flags of gymnasium are always False."""
        rewards = np.zeros(self._chunk, np.float32)
        succeeded, executed = np.zeros(self._chunk, bool), np.zeros(self._chunk, bool)
        if action["active"]:
            for i, single in enumerate(action["actions"]):
                if self._expert is not None:
                    self._expert.act(self._scene.observation)  # follows what really happens
                rewards[i], succeeded[i] = self._scene.step(np.asarray(single, np.float64))
                executed[i] = True
                if succeeded[i] and action["stop_at_end"]:
                    break
            self._look()
        info = {"rewards": rewards, "succeeded": succeeded, "executed": executed}
        return self._last, float(rewards.sum()), False, False, info

    def expert_chunk(self) -> Array:
        """float32 [C, 7]: what the closed-loop expert does in the next C steps if nothing disturbs it."""
        task = self._scene.task
        if self._expert is None:
            self._expert = Expert(recipe(self._config.suite, task.index, task.instruction))
        actions = np.zeros((self._chunk, ACTION_DIM), np.float32)
        expert = deepcopy(self._expert)
        with self._scene.rehearsal():
            for i in range(self._chunk):
                actions[i] = expert.act(self._scene.observation)
                self._scene.step(np.asarray(actions[i], np.float64))
        return actions

    def close(self) -> None:
        if self._scene is not None:
            self._scene.close()
            self._scene = None


def _leave_with_owner() -> None:
    """End this process when its owner has ended in any way, whatever this process is doing."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)


@frozen
class MakeRow:
    """Makes a row in the process that calls it; in another than `home`, ties it to its owner."""

    config: LiberoConfig
    chunk: int
    index: int
    home: int
    """Process id of the batch's owner."""

    def __call__(self) -> Row:
        if os.getpid() != self.home:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
            threading.Thread(target=_leave_with_owner, daemon=True).start()
        return Row(self.config, self.chunk, self.index)
