"""LIBERO as a batch of env instances: its tasks and reset states, and one instance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Array, EnvInfo, ResetState, TaskInfo
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.expert import Expert, find_recipe
from vla_rl.plugins.envs.libero.plus import SUITES as PLUS_SUITES
from vla_rl.plugins.envs.libero.plus.variants import FIRST_VARIANT, Variant, list_remarks, select_variants, variant_of
from vla_rl.plugins.envs.libero.plus_assets import assets_folder, scene_changes
from vla_rl.plugins.envs.libero.plus_files import (
    find_instruction,
    has_own_layout,
    initial_state,
    joint_angles,
    task_file,
)
from vla_rl.plugins.envs.libero.scene_changes import StartChanges
from vla_rl.plugins.envs.libero.scenes import SceneCache
from vla_rl.plugins.envs.libero.suites import Suite
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

ACTION_DIM, STATE_DIM = 7, 8
OFFICIAL_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
IDS_PER_SUITE, IDS_PER_TASK, FIRST_TRAIN = 1_000_000, 1000, 500
"""State ids: 1,000,000 times the suite's number, plus 1000 times the task's, plus 0 to 499 for official states or 500
to 999 for drawn ones."""
TRIES = 10
"""Number of draws from which a train state is chosen."""
NOISY_CAMERA = "agentview"
"""Camera to which LIBERO-Plus adds sensor noise."""
DIFFERENT = 1e-3
"""Least distance of a train state from every official state: metres, summed over all objects."""


def tasks_of_suites(config: LiberoConfig) -> Mapping[str, Sequence[int | str] | None]:
    """Return suite -> numbers or names of its tasks in this run, None for all."""
    if config.plus is not None:
        return dict.fromkeys(config.plus.suites or PLUS_SUITES)
    return config.suites or {config.suite or "": config.tasks}


def suite_numbers(config: LiberoConfig) -> dict[str, int]:
    """Return name -> number of the suites of a run; official suites always have the same number."""
    names = list(tasks_of_suites(config))
    others = sorted(name for name in names if name not in OFFICIAL_SUITES)
    return {
        name: OFFICIAL_SUITES.index(name) if name in OFFICIAL_SUITES else len(OFFICIAL_SUITES) + others.index(name)
        for name in names
    }


def make_env(config: LiberoConfig, context: EnvContext) -> SubprocEnvs:
    """Return the env instances of a spec. Raise UserError for a suite or a task that does not exist."""
    os.environ.setdefault("MUJOCO_GL", "egl")
    info, states = describe_env(config)
    make_one = partial(LiberoEnv, scenes=SceneCache(config, context.device), config=config)
    return SubprocEnvs(info, states, make_one, context, config.processes)


def describe_env(config: LiberoConfig) -> tuple[EnvInfo, dict[str, list[ResetState]]]:
    """Return the description of a spec's envs, and split -> reset states. Raise UserError for a suite or a task that
    does not exist."""
    numbers = suite_numbers(config)
    tasks: list[TaskInfo] = []
    states: dict[str, list[ResetState]] = {"train": [], "eval": []}
    suites = {name: Suite(name) for name in numbers}
    for name, chosen in tasks_of_suites(config).items():
        suite = suites[name]
        for task in suite.select_tasks(chosen):
            limit = suite.max_steps(config.step_limits)
            tasks.append(TaskInfo(name=task.name, instruction=task.instruction, max_steps=limit))
            first = numbers[name] * IDS_PER_SUITE + task.index * IDS_PER_TASK
            official = range(first, first + len(suite.initial_states(task.index)))
            drawn = official
            if isinstance(config.train_states, int):
                drawn = range(first + FIRST_TRAIN, first + FIRST_TRAIN + config.train_states)
            states["eval"] += [ResetState(id=i, task=task.name) for i in official]
            states["train"] += [ResetState(id=i, task=task.name) for i in drawn]
    plus_notes: tuple[str, ...] = ()
    if config.plus is not None:
        variants = select_variants(config.plus)
        plus_notes = list_remarks(config.plus)
        states["eval"] = [ResetState(id=variant.state_id, task=variant.task_name) for variant in variants]
        tasks += [variant_task(variant, suites[variant.suite], config) for variant in variants]
    notes = {
        "train_states: official: training starts from the evaluation states": config.train_states == "official",
        "fast_render: no reflections, simpler meshes: other pixels than the official simulator's": config.fast_render,
        "fast_physics: states differ from the official simulator's, typically by 2e-6": config.fast_physics,
    }
    info = EnvInfo(
        cameras={name: (size, size) for name, size in config.cameras.items()},
        state_dim=STATE_DIM,
        action_low=(-1.0,) * ACTION_DIM,
        action_high=(1.0,) * ACTION_DIM,
        tasks=tuple(tasks),
        notes=tuple(note for note, holds in notes.items() if holds) + plus_notes,
    )
    return info, states


def variant_task(variant: Variant, suite: Suite, config: LiberoConfig) -> TaskInfo:
    """Return the task of a LIBERO-Plus variant."""
    assert config.plus is not None
    (base,) = suite.select_tasks([variant.base])
    return TaskInfo(
        name=variant.task_name,
        instruction=find_instruction(variant, base.instruction, config.plus.instructions == "official"),
        max_steps=suite.max_steps(config.step_limits),
        categories=variant.categories,
    )


class LiberoEnv(SingleEnv):
    """Env instance that shares its process's scene of the task with the other instances, in turns."""

    def __init__(self, number: int, scenes: SceneCache, config: LiberoConfig) -> None:
        """Create the instance; `scenes` are those of the process in which it lives."""
        self._number = number
        self._scenes = scenes
        self._config = config
        self._keep_joints = config.plus is not None and config.plus.robot_states == "perturbed"
        self._expert: Expert | None = None
        self._variant: Variant | None = None

    @property
    def _current_scene(self) -> Any:
        """Scene of the current task, in the state in which this instance left it."""
        return self._scenes.resume_scene(self._number)

    @cached_property
    def _numbered_suites(self) -> dict[int, Suite]:
        return {number: Suite(name) for name, number in suite_numbers(self._config).items()}

    @cached_property
    def _assets_folder(self) -> Path | None:
        """Folder of LIBERO-Plus's assets."""
        return None if self._config.plus is None else assets_folder(self._config.plus.assets)

    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode. The state id determines everything; `seed` has no effect."""
        self._state_id = state_id
        self._steps = 0
        self._variant = None
        if state_id >= FIRST_VARIANT:
            self._reset_variant(state_id)
            return
        number, within = divmod(state_id, IDS_PER_SUITE)
        index, state = divmod(within, IDS_PER_TASK)
        self._suite = self._numbered_suites[number]
        self._expert = None
        scene = self._scenes.begin_episode(self._number, self._suite.tasks[index])
        if state < FIRST_TRAIN:
            scene.place(0, self._suite.initial_states(index)[state], self._config.settle_steps)
        else:
            scene.place(self._draw_seed(state_id), None, self._config.settle_steps)

    def _reset_variant(self, state_id: int) -> None:
        self._variant = variant = variant_of(state_id)
        self._suite = self._numbered_suites[OFFICIAL_SUITES.index(variant.suite)]
        self._expert = None
        (base,) = self._suite.select_tasks([variant.base])
        task = evolve(base, changes=scene_changes(variant, self._assets_folder))
        if has_own_layout(variant):
            task = evolve(task, bddl_file=str(task_file(variant)))
        changes = StartChanges(
            view=variant.view,
            joints=joint_angles(variant.robot) if variant.robot else None,
            keep_joints=variant.robot > 0 and self._keep_joints,
        )
        state = initial_state(variant, self._suite, base.index)
        self._scenes.begin_episode(self._number, task).place(0, state, self._config.settle_steps, changes)

    def step(self, action: Array) -> Outcome:
        scene = self._current_scene
        self._steps += 1
        if self._expert is not None:
            self._expert.choose_action(scene.observation)  # the expert tracks the executed actions
        reward, success = scene.step(np.asarray(action, np.float64))
        return Outcome(reward, success, terminated=success)

    def render(self) -> View:
        scene = self._current_scene
        images = scene.images()
        if self._variant is not None and self._variant.noise and NOISY_CAMERA in images:
            images[NOISY_CAMERA] = self._add_sensor_noise(images[NOISY_CAMERA], self._variant.noise)
        return View(images, scene.state())

    def _add_sensor_noise(self, image: Array, noise: int) -> Array:
        """Return an image with sensor noise, which the official code adds before the image is turned upright. Its
        random numbers belong to the state and the step."""
        from vla_rl.plugins.envs.libero.plus.noise import add_noise

        seed = derived_seed(0, "libero_plus/noise", self._state_id, self._steps) % 2**32
        return add_noise(image[::-1, ::-1], noise, np.random.RandomState(seed))[::-1, ::-1]

    def expert_chunk(self, length: int) -> Array:
        """Return the actions that the closed-loop expert takes in the next steps if nothing disturbs it."""
        scene = self._current_scene
        if self._expert is None:
            self._expert = Expert(find_recipe(self._suite.name, scene.task.index, scene.task.instruction))
        actions = np.zeros((length, ACTION_DIM), np.float32)
        expert = deepcopy(self._expert)
        with scene.rehearsal():
            for i in range(length):
                actions[i] = expert.choose_action(scene.observation)
                scene.step(np.asarray(actions[i], np.float64))
        return actions

    def close(self) -> None:
        self._scenes.drop_env(self._number)

    def _draw_seed(self, state_id: int) -> int:
        """Return the seed of a train state, which depends on the task's name and the state's number only. Its placement
        is never that of an official state. Raise UserError where no draw differs from all official states."""
        seed_of_state, scene = self._scenes.seeds, self._current_scene
        if state_id not in seed_of_state:
            purpose, number = f"libero/{scene.task.name}", state_id % IDS_PER_TASK
            official = self._suite.initial_states(scene.task.index)
            seeds = (derived_seed(0, purpose, number, attempt) % 2**32 for attempt in range(TRIES))
            others = (seed for seed in seeds if scene.distance(seed, official) > DIFFERENT)
            try:
                seed_of_state[state_id] = scene.calm_seed(others)
            except ValueError as exc:
                raise UserError(
                    f"{self._suite.name} task {scene.task.index} placed its things as in an official state in "
                    f"each of {TRIES} draws, so it has no separate train states; leave it out of training, or "
                    "train with train_states: official"
                ) from exc
        return seed_of_state[state_id]
