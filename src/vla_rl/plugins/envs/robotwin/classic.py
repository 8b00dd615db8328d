"""Classic API of RoboTwin: a task object with `setup_demo`, `take_action` and `get_obs`; one env instance per
process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Array
from vla_rl.plugins.envs.robotwin.checks import CAMERAS
from vla_rl.plugins.envs.robotwin.installation import NO_LIMIT, Installation
from vla_rl.plugins.envs.robotwin.quiet import quiet
from vla_rl.plugins.envs.robotwin.seeds import SeedBook
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View


@frozen(kw_only=True)
class MakeRobotwinEnv:
    """Factory that creates env instances in their processes."""

    robotwin: Installation
    book: SeedBook

    def __call__(self, number: int) -> RobotwinEnv:
        return RobotwinEnv(self.robotwin, self.book)


class RobotwinEnv(SingleEnv):
    """Env instance that imports RoboTwin at its first reset, and keeps a task object until another task is needed."""

    def __init__(self, robotwin: Installation, book: SeedBook) -> None:
        self._robotwin = robotwin
        self._book = book
        self._name = ""
        self._task: Any = None
        self._arguments: dict[str, Any] = {}
        self._things: dict[tuple[str, int], dict[str, str] | None] = {}
        self._scenes = 0

    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode. The state id determines everything, the wording too; `seed` has no effect."""
        with quiet():
            self._enter(self._book.task(state_id))
            self._place(state_id)

    def step(self, action: Array) -> Outcome:
        """Execute an action. After success the robot moves no more: RoboTwin ignores further actions."""
        with quiet():
            self._task.take_action(np.asarray(action, np.float64), action_type="qpos")
        solved = bool(self._task.eval_success)
        return Outcome(float(solved), solved, terminated=solved)

    def render(self) -> View:
        with quiet():
            obs = self._task.get_obs()
        cameras = obs["observation"]
        images = {name: np.ascontiguousarray(cameras[CAMERAS[name]]["rgb"]) for name in self._robotwin.config.cameras}
        state = np.asarray(obs["joint_action"]["vector"], np.float32)
        return View(images, state, self._task.get_instruction())

    def close(self) -> None:
        if self._task is not None:
            with quiet():
                self._task.close_env(clear_cache=True)
            self._task = None

    def _enter(self, name: str) -> None:
        """Load the object of this task."""
        if name == self._name and self._task is not None:
            return
        self.close()
        self._robotwin.enter()
        os.chdir(self._robotwin.assets)  # RoboTwin's asset paths are relative to its checkout
        self._name = name
        self._task = self._robotwin.task(name)
        self._arguments = self._robotwin.arguments(name)

    def _place(self, state_id: int) -> None:
        """Set up a state's scene, with the first of its seeds that can be used."""
        check = self._book.checked(state_id, without_file=False)
        unstable, tried = self._robotwin.unstable_error(), []
        for seed in self._book.candidates(state_id):
            tried.append(seed)
            things = self._expert_solves(seed, unstable) if check else {}
            if things is None:
                continue
            try:
                self._set_up(seed)
            except unstable:
                continue
            break
        else:
            raise self._book.no_seed_works(
                state_id, tried, "things do not come to rest, or the expert does not solve it"
            )
        self._task.step_lim = NO_LIMIT
        text = self._robotwin.full_description(self._name)
        if things:
            text = self._robotwin.instruction(self._name, things, derived_seed(0, "robotwin/instruction", state_id))
        self._task.set_instruction(instruction=text)

    def _set_up(self, seed: int) -> None:
        if self._scenes:
            often = max(1, int(self._arguments["clear_cache_freq"]))
            self._task.close_env(clear_cache=self._scenes % often == 0)
        self._scenes += 1
        self._task.setup_demo(now_ep_num=seed, seed=seed, is_test=True, **self._arguments)

    def _expert_solves(self, seed: int, unstable: type[Exception]) -> dict[str, str] | None:
        """Return the objects of the scene that the expert's solution reports, placeholder -> object; None when it did
        not solve the scene."""
        key = self._name, seed
        if key not in self._things:
            try:
                self._set_up(seed)
                self._things[key] = self._run_expert()
            except unstable:
                self._things[key] = None
        return self._things[key]

    def _run_expert(self) -> dict[str, str] | None:
        try:
            info = self._task.play_once()
        except Exception:  # planners fail in many ways; RoboTwin's evaluation counts all as a bad seed
            return None
        return dict(info["info"]) if self._task.plan_success and self._task.check_success() else None
