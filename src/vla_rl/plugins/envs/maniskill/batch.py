"""Rows as copies of one task in a single simulator, all stepped together: for a GPU. Tensors stay on its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import ChunkResult, EnvInfo, Observation, ResetState, to_numpy
from vla_rl.plugins.envs.maniskill.expert import rehearsed
from vla_rl.plugins.envs.maniskill.scene import ManiSkillScene, Place, SavedScene
from vla_rl.plugins.envs.maniskill.states import IDS_PER_TASK


class BatchEnv(SimEnv):
    """Physics moves every row at each step. Rows that shall stand still are put back to where they were."""

    def __init__(
        self,
        info: EnvInfo,
        states: Mapping[str, Sequence[ResetState]],
        scene: ManiSkillScene,
        place: Place,
        chunk: int,
    ) -> None:
        """
        Args:
            states: split -> its reset states.
            place: that of `scene`, for a second one in which the expert tries out what it does.
        """
        self.num_envs, self.info = scene.num_envs, info
        self._states = {split: tuple(of_split) for split, of_split in states.items()}
        self._scene, self._place, self._chunk = scene, place, chunk
        self._twin: ManiSkillScene | None = None

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._states[split]

    def reset(self, rows: Any, state_ids: Any, seed: Any) -> Observation:
        """A state id fixes the scene. What a few tasks draw while they are played is shared by all rows, and keyed by
        the `seed` of the row that was reset last."""
        rows = to_numpy(rows)
        for row, state, key in zip(rows, to_numpy(state_ids), to_numpy(seed), strict=True):
            self._scene.reset(int(row), int(state) % IDS_PER_TASK, int(key))
        return self._look().take(rows)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        device = self._scene.device
        actions = torch.as_tensor(actions, dtype=torch.float32, device=device)
        moving = torch.tensor(to_numpy(active), dtype=torch.bool, device=device)
        shape = actions.shape[:2]
        rewards = torch.zeros(shape, device=device)
        succeeded, terminated, executed = torch.zeros((3, *shape), dtype=torch.bool, device=device)
        still = None if moving.all() else self._scene.save()
        for i in range(shape[1]):
            played = self._scene.step(actions[:, i] * moving[:, None])
            executed[:, i], rewards[:, i] = moving, played.reward * moving
            succeeded[:, i], terminated[:, i] = played.success & moving, played.ended & moving
            ended = terminated[:, i]
            if stop_at_end and ended.any():
                still = _merged(still, self._scene.save(), ended)
                moving = moving & ~ended
                if not moving.any():
                    break
        if still is not None:
            self._scene.restore(still, torch.nonzero(~moving)[:, 0].tolist())
        last = (executed.sum(1) - 1).clip(min=0)
        return ChunkResult(
            obs=self._look(),
            rewards=rewards,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            executed=executed,
            success=succeeded.gather(1, last[:, None])[:, 0],
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Tensor:
        """Raises NotOffered for a task without an expert."""
        if self._twin is None:
            self._twin = ManiSkillScene(evolve(self._scene.recipe, cameras={}), self._place, self.num_envs)
        return rehearsed(self._twin, self._scene.save(), self._chunk)

    def close(self) -> None:
        for scene in (self._scene, self._twin):
            if scene is not None and scene.env.scene is not None:
                scene.close()

    def _look(self) -> Observation:
        scene = self._scene
        words = scene.instructions() or [self.info.tasks[0].instruction] * self.num_envs
        return Observation(images=scene.images(), instructions=tuple(words), state=scene.state())


def _merged(old: SavedScene | None, new: SavedScene, rows: Tensor) -> SavedScene:
    """The old state with these rows (bool [N]) of the new one."""
    return (
        new
        if old is None
        else SavedScene(
            _merge(old.bodies, new.bodies, rows),
            tuple(_merge(one, other, rows) for one, other in zip(old.kept, new.kept, strict=True)),
        )
    )


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name, tensor in new.items():
        if isinstance(tensor, Mapping):
            merged[name] = _merge(old[name], tensor, rows)
        else:
            merged[name] = torch.where(rows.view(-1, *[1] * (tensor.ndim - 1)), tensor, old.get(name, tensor))
    return merged
