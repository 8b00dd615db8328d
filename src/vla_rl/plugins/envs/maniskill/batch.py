"""GPU backend: env instances are copies of one task in a single simulator and step together. Tensors stay on its
device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import ChunkResult, EnvInfo, Observation, ResetState, to_numpy
from vla_rl.plugins.envs.maniskill.expert import rehearse_chunk
from vla_rl.plugins.envs.maniskill.scene import ManiSkillScene, SavedScene, SimulationDevices
from vla_rl.plugins.envs.maniskill.tasks import IDS_PER_TASK


class BatchEnv(SimEnv):
    """Batched simulator of one task. Physics moves every env instance at each step; instances that have to stay still
    are restored afterwards."""

    def __init__(
        self,
        info: EnvInfo,
        states: Mapping[str, Sequence[ResetState]],
        scene: ManiSkillScene,
        place: SimulationDevices,
        chunk: int,
    ) -> None:
        """Create the batched simulator.

        Args:
            states: split -> its reset states.
            place: devices of `scene`, also for a second scene in which the expert plans.
        """
        self.num_envs = scene.num_envs
        self.info = info
        self._states = {split: tuple(of_split) for split, of_split in states.items()}
        self._scene = scene
        self._place = place
        self._chunk = chunk
        self._twin: ManiSkillScene | None = None

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._states[split]

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        """Start episodes. A state id fixes the scene. Random numbers that a few tasks draw during an episode are shared
        by all instances, and depend on the `seed` of the instance that was reset last."""
        env_ids = to_numpy(env_ids)
        for env_id, state, key in zip(env_ids, to_numpy(state_ids), to_numpy(seed), strict=True):
            self._scene.reset(int(env_id), int(state) % IDS_PER_TASK, int(key))
        return self._observe_envs().take(env_ids)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        device = self._scene.device
        actions = torch.as_tensor(actions, dtype=torch.float32, device=device)
        moving = torch.tensor(to_numpy(active), dtype=torch.bool, device=device)
        shape = actions.shape[:2]
        rewards = torch.zeros(shape, device=device)
        succeeded, terminated, executed = torch.zeros((3, *shape), dtype=torch.bool, device=device)
        # ManiSkill steps all envs: those that are to stand still are put back afterwards.
        still = None if moving.all() else self._scene.save()
        for i in range(shape[1]):
            result = self._scene.step(actions[:, i] * moving[:, None])
            executed[:, i], rewards[:, i] = moving, result.reward * moving
            succeeded[:, i], terminated[:, i] = result.success & moving, result.ended & moving
            ended = terminated[:, i]
            if stop_at_end and ended.any():
                still = _merge_scenes(still, self._scene.save(), ended)
                moving = moving & ~ended
                if not moving.any():
                    break
        if still is not None:
            self._scene.restore(still, torch.nonzero(~moving)[:, 0].tolist())
        last = (executed.sum(1) - 1).clip(min=0)
        return ChunkResult(
            obs=self._observe_envs(),
            rewards=rewards,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            executed=executed,
            success=succeeded.gather(1, last[:, None])[:, 0],
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Tensor:
        """Return the expert's next chunk. Raise UserError for a task without an expert."""
        if self._twin is None:
            self._twin = ManiSkillScene(evolve(self._scene.recipe, cameras={}), self._place, self.num_envs)
        return rehearse_chunk(self._twin, self._scene.save(), self._chunk)

    def close(self) -> None:
        for scene in (self._scene, self._twin):
            if scene is not None and scene.env.scene is not None:
                scene.close()

    def _observe_envs(self) -> Observation:
        scene = self._scene
        words = scene.instructions() or [self.info.tasks[0].instruction] * self.num_envs
        return Observation(images=scene.images(), instructions=tuple(words), state=scene.state())


def _merge_scenes(old: SavedScene | None, new: SavedScene, chosen: Tensor) -> SavedScene:
    """Return the old state with these envs (bool [N]) replaced by those of the new one."""
    return (
        new
        if old is None
        else SavedScene(
            _merge_tensors(old.bodies, new.bodies, chosen),
            tuple(_merge_tensors(one, other, chosen) for one, other in zip(old.kept, new.kept, strict=True)),
        )
    )


def _merge_tensors(old: Mapping[str, Any], new: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name, tensor in new.items():
        if isinstance(tensor, Mapping):
            merged[name] = _merge_tensors(old[name], tensor, chosen)
        else:
            merged[name] = torch.where(chosen.view(-1, *[1] * (tensor.ndim - 1)), tensor, old.get(name, tensor))
    return merged
