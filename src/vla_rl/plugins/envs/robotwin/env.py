"""Builds the RoboTwin simulator from the settings, and its classic API: a task object with `setup_demo`, `take_action`
and `get_obs`; one env instance a process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Array, EnvInfo, TaskInfo
from vla_rl.plugins.envs.robotwin.config import CAMERAS, STATE_DIM, RobotwinConfig, camera_sizes
from vla_rl.plugins.envs.robotwin.end_effector import move_to_poses
from vla_rl.plugins.envs.robotwin.expert import JOINTS_ONLY, ExpertMotion, joint_targets, solve_scene
from vla_rl.plugins.envs.robotwin.installation import NO_LIMIT, Installation, find_installation
from vla_rl.plugins.envs.robotwin.patches import kept_randomness, suppress_prints
from vla_rl.plugins.envs.robotwin.seeds import SPLITS, SeedBook
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS, task_names
from vla_rl.plugins.envs.robotwin.vector import VectorRobotwin
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View, env_factory
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs


def make_env(config: RobotwinConfig, context: EnvContext) -> SimEnv:
    """Return the simulator. Raise UserError when there is no RoboTwin, no assets, or when the settings ask for
    something that it does not have."""
    robotwin = find_installation(config)
    tasks = task_names(config.tasks)
    book = SeedBook(config.seeds, tasks)
    cameras = camera_sizes(config.cameras, robotwin.settings, config.image_height)
    action_low, action_high = robotwin.action_bounds()
    info = EnvInfo(
        cameras=cameras,
        state_dim=STATE_DIM,
        action_low=action_low,
        action_high=action_high,
        tasks=tuple(
            TaskInfo(
                name=task,
                instruction=robotwin.full_description(task),
                max_steps=STEP_LIMITS[task],
                instruction_varies=True,
            )
            for task in tasks
        ),
        notes=_list_notes(config, robotwin),
        chunk_is_one_motion=robotwin.api == "vector" and config.control == "joints",
    )
    if robotwin.api == "classic":
        states = {split: book.list_states(split) for split in SPLITS}
        return SubprocEnvs(info, states, env_factory(RobotwinEnv, robotwin, book), context, config.processes)
    if config.processes.recycle_episodes is not None or config.processes.recycle_mib is not None:
        raise UserError("processes.recycle_episodes and recycle_mib have no effect with RoboTwin's vector API")
    return VectorRobotwin(info, book, robotwin, context)


def _list_notes(config: RobotwinConfig, robotwin: Installation) -> tuple[str, ...]:
    named = config.task_config if isinstance(config.task_config, str) else "settings of the spec"
    notes = [f"RoboTwin's {robotwin.api} API, task_config: {named}, instructions: {robotwin.instruction_type}"]
    notes.append("images are ray-traced" if config.render == "ray" else "images are rasterised, not ray-traced")
    if not config.shadows:
        notes.append("images have no shadows")
    for split in SPLITS:
        file = getattr(config.seeds, split)
        source = f"from {file.name}" if file else f"from {100_000 * (1 + SPLITS.index(split))} on"
        notes.append(f"{split} seeds {source}")
    if config.seeds.check is False:
        notes.append("seeds.check: false: RoboTwin's expert may be unable to solve some scenes")
    if (robotwin.settings.get("domain_randomization") or {}).get("random_background"):
        notes.append("backgrounds of training are from RoboTwin's evaluation set too")
    return tuple(notes)


class RobotwinEnv(SingleEnv):
    """Env instance that imports RoboTwin at its first reset, and keeps a task object until another task is needed."""

    def __init__(self, robotwin: Installation, book: SeedBook) -> None:
        self._robotwin = robotwin
        self._book = book
        self._name = ""
        self._task: Any = None
        self._arguments: dict[str, Any] = {}
        self._solutions: dict[tuple[str, int], ExpertMotion | None] = {}
        """(Task, seed) -> the expert's solution, of the scenes that it has played; None: it failed."""
        self._scenes = 0
        self._seed = 0
        self._executed = 0
        """Actions of the episode."""

    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode. The state id determines everything, the wording too; `seed` has no effect."""
        with suppress_prints():
            self._enter_task(self._book.find_task(state_id))
            self._place_scene(state_id)
        self._executed = 0

    def step(self, action: Array) -> Outcome:
        """Execute an action. After success the robot moves no more: RoboTwin ignores further actions."""
        with suppress_prints():
            if self._robotwin.config.control == "joints":
                self._task.take_action(np.asarray(action, np.float64), action_type="qpos")
            else:
                move_to_poses(self._task, action)
        self._executed += 1
        solved = bool(self._task.eval_success)
        return Outcome(float(solved), solved, terminated=solved)

    def render(self) -> View:
        with suppress_prints():
            obs = self._task.get_obs()
        cameras = obs["observation"]
        images = {name: np.ascontiguousarray(cameras[CAMERAS[name]]["rgb"]) for name in self._robotwin.config.cameras}
        state = np.asarray(obs["joint_action"]["vector"], np.float32)
        return View(images, state, self._task.get_instruction())

    def expert_chunk(self, length: int) -> Array:
        """Return the next targets of the expert's solution of the scene, by the number of actions that were executed;
        where the expert cannot solve it, the targets that the joints have."""
        if self._robotwin.config.control != "joints":
            raise UserError(JOINTS_ONLY)
        key = self._name, self._seed
        with suppress_prints(), kept_randomness():
            if key not in self._solutions:
                scene = self._robotwin.create_task(self._name)
                try:
                    self._solutions[key] = solve_scene(self._robotwin, scene, *key)
                finally:
                    scene.close_env()
        solution = self._solutions[key]
        if solution is None:
            low, high = self._robotwin.joint_bounds()
            targets = np.clip(
                joint_targets(self._task.robot), np.asarray(low, np.float32), np.asarray(high, np.float32)
            )
            return np.tile(targets, (length, 1))
        return solution.take_chunk(self._executed, length)

    def close(self) -> None:
        if self._task is not None:
            with suppress_prints():
                self._task.close_env(clear_cache=True)
            self._task = None

    def _enter_task(self, name: str) -> None:
        """Load the object of this task."""
        if name == self._name and self._task is not None:
            return
        self.close()
        self._robotwin.make_importable()
        os.chdir(self._robotwin.assets)  # RoboTwin's asset paths are relative to its checkout
        self._name = name
        self._task = self._robotwin.create_task(name)
        self._arguments = self._robotwin.setup_arguments(name)

    def _place_scene(self, state_id: int) -> None:
        """Set up a state's scene, with the first of its seeds that can be used."""
        check = self._book.needs_check(state_id, without_file=False)
        unstable, tried = self._robotwin.unstable_error(), []
        for seed in self._book.list_candidates(state_id):
            tried.append(seed)
            solution = self._solve_scene(seed) if check else None
            if check and solution is None:
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
        self._seed = seed
        self._task.step_lim = NO_LIMIT
        text = self._robotwin.full_description(self._name)
        if solution is not None and solution.things:
            text = self._robotwin.draw_instruction(
                self._name, solution.things, derived_seed(0, "robotwin/instruction", state_id)
            )
        self._task.set_instruction(instruction=text)

    def _set_up(self, seed: int) -> None:
        self._close_scene()
        self._task.setup_demo(now_ep_num=seed, seed=seed, is_test=True, **self._arguments)

    def _close_scene(self) -> None:
        """Close the task's scene, if it has one, and now and then RoboTwin's caches."""
        if self._scenes:
            often = max(1, int(self._arguments["clear_cache_freq"]))
            self._task.close_env(clear_cache=self._scenes % often == 0)
        self._scenes += 1

    def _solve_scene(self, seed: int) -> ExpertMotion | None:
        """Return the expert's solution of a scene, which it plays with this task object."""
        key = self._name, seed
        if key not in self._solutions:
            self._close_scene()
            self._solutions[key] = solve_scene(self._robotwin, self._task, *key)
        return self._solutions[key]
