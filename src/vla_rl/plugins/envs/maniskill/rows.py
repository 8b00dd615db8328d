"""A row on processors: one simulator of the task that is played."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from vla_rl.core.types import Array, to_numpy
from vla_rl.plugins.envs.maniskill.expert import rehearsed
from vla_rl.plugins.envs.maniskill.scene import ManiSkillScene, Place, SceneRecipe
from vla_rl.plugins.envs.maniskill.states import IDS_PER_TASK
from vla_rl.toolkit.envs.row import Outcome, Row, View


@frozen
class MakeManiSkillEnv:
    recipes: tuple[SceneRecipe, ...]
    """In the order of the tasks."""
    place: Place
    home: int
    """Process id of the batch's owner."""

    def __call__(self, number: int) -> ManiSkillRow:
        if os.getpid() != self.home:
            torch.set_num_threads(1)  # rows are many, and their tensors tiny
        return ManiSkillRow(self.recipes, self.place)


class ManiSkillRow(Row):
    """Builds a task's simulator at its first reset, and again when the task changes. In inference mode, all of it: a
    step is hundreds of operations on tiny tensors."""

    def __init__(self, recipes: Sequence[SceneRecipe], place: Place) -> None:
        self._recipes, self._place = recipes, place
        self._scene: Any = None
        self._twin: Any = None

    @torch.inference_mode()
    def reset(self, state_id: int, seed: int) -> None:
        """A state id fixes the scene; `seed` keys what a few tasks draw while they are played."""
        index, number = divmod(state_id, IDS_PER_TASK)
        if self._scene is None or self._scene.recipe != self._recipes[index]:
            scene = ManiSkillScene(
                self._recipes[index], self._place
            )  # before the old one goes, and its compiled shaders with it
            self.close()
            self._scene = scene
        self._scene.reset(0, number, seed)

    @torch.inference_mode()
    def step(self, action: Array) -> Outcome:
        played = self._scene.step(torch.tensor(action)[None])
        success, ended = bool(played.success), bool(played.ended)
        return Outcome(float(played.reward), success, terminated=ended)

    @torch.inference_mode()
    def render(self) -> View:
        images = {name: to_numpy(image)[0] for name, image in self._scene.images().items()}
        words = self._scene.instructions()
        return View(images, to_numpy(self._scene.state())[0], words[0] if words else None)

    @torch.inference_mode()
    def expert_chunk(self, length: int) -> Array:
        """What the closed-loop expert does in the next steps if nothing disturbs it, tried out in a second simulator:
        going back to an earlier state leaves traces in PhysX."""
        if self._twin is None:
            self._twin = ManiSkillScene(evolve(self._scene.recipe, cameras={}), self._place)
        actions: Array = to_numpy(rehearsed(self._twin, self._scene.save(), length))[0]
        return actions

    def close(self) -> None:
        for scene in (self._scene, self._twin):
            if scene is not None:
                scene.close()
        self._scene = self._twin = None
