"""CPU backend: an env instance with one simulator of the current task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from vla_rl.core.types import Array, to_numpy
from vla_rl.plugins.envs.maniskill.expert import rehearse_chunk
from vla_rl.plugins.envs.maniskill.scene import ManiSkillScene, SceneRecipe, SimulationDevices
from vla_rl.plugins.envs.maniskill.tasks import IDS_PER_TASK
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View


@frozen
class MakeManiSkillEnv:
    """Factory that creates env instances in their processes."""

    recipes: tuple[SceneRecipe, ...]
    """Recipes of the tasks, in the order of the spec."""
    place: SimulationDevices
    owner_pid: int
    """Process id of the process that owns the batch."""

    def __call__(self, number: int) -> ManiSkillEnv:
        if os.getpid() != self.owner_pid:
            torch.set_num_threads(1)  # envs are many, and their tensors tiny
        return ManiSkillEnv(self.recipes, self.place)


class ManiSkillEnv(SingleEnv):
    """Env instance that builds a task's simulator at its first reset, and again when the task changes. Everything runs
    in inference mode: a step is hundreds of operations on tiny tensors."""

    def __init__(self, recipes: Sequence[SceneRecipe], place: SimulationDevices) -> None:
        self._recipes = recipes
        self._place = place
        self._scene: Any = None
        self._twin: Any = None

    @torch.inference_mode()
    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode. The state id fixes the scene; `seed` determines what a few tasks draw during an episode."""
        index, number = divmod(state_id, IDS_PER_TASK)
        if self._scene is None or self._scene.recipe != self._recipes[index]:
            scene = ManiSkillScene(
                self._recipes[index], self._place
            )  # built before the old one is closed, which would discard the compiled shaders
            self.close()
            self._scene = scene
        self._scene.reset(0, number, seed)

    @torch.inference_mode()
    def step(self, action: Array) -> Outcome:
        result = self._scene.step(torch.tensor(action)[None])
        success, ended = bool(result.success), bool(result.ended)
        return Outcome(float(result.reward), success, terminated=ended)

    @torch.inference_mode()
    def render(self) -> View:
        images = {name: to_numpy(image)[0] for name, image in self._scene.images().items()}
        words = self._scene.instructions()
        return View(images, to_numpy(self._scene.state())[0], words[0] if words else None)

    @torch.inference_mode()
    def expert_chunk(self, length: int) -> Array:
        """Return the actions that the closed-loop expert takes in the next steps if nothing disturbs it. They are found
        in a second simulator: going back to an earlier state leaves traces in PhysX."""
        if self._twin is None:
            self._twin = ManiSkillScene(evolve(self._scene.recipe, cameras={}), self._place)
        actions: Array = to_numpy(rehearse_chunk(self._twin, self._scene.save(), length))[0]
        return actions

    def close(self) -> None:
        for scene in (self._scene, self._twin):
            if scene is not None:
                scene.close()
        self._scene = self._twin = None
