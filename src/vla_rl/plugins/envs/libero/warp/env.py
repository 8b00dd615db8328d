"""LIBERO on MuJoCo Warp as a batched simulator: envs are worlds of batches, one or more for each task."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from vla_rl.core.capabilities import Offloadable
from vla_rl.core.contexts import EnvContext
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import Array, ChunkResult, Observation, ResetState, to_numpy
from vla_rl.plugins.envs.libero.single_env import ACTION_DIM, STATE_DIM, describe_env, tasks_of_suites
from vla_rl.plugins.envs.libero.suites import LiberoTask, Suite
from vla_rl.plugins.envs.libero.warp.checks import CPU_IS_FOR_TESTS
from vla_rl.plugins.envs.libero.warp.config import LiberoWarpConfig
from vla_rl.plugins.envs.libero.warp.goals import check_goal

if TYPE_CHECKING:
    from vla_rl.plugins.envs.libero.warp.batch import WorldBatch
    from vla_rl.plugins.envs.libero.warp.task_model import EpisodeStart

logger = logging.getLogger(__name__)

NOTE = "MuJoCo Warp: states and images differ from the official simulator's"


def make_env(config: LiberoWarpConfig, context: EnvContext) -> LiberoWarpEnv:
    """Return the envs of a spec. Raise UserError for a suite or a task that does not exist, or whose goal is not
    written for batches."""
    for name, chosen in tasks_of_suites(config.official()).items():
        for task in Suite(name).select_tasks(chosen):
            check_goal(task)
    if context.device == "cpu":
        logger.warning(CPU_IS_FOR_TESTS)
    # Nothing is drawn with OpenGL, whose libraries may be missing.
    os.environ.setdefault("MUJOCO_GL", "disable")
    return LiberoWarpEnv(config, context)


class LiberoWarpEnv(SimEnv, Offloadable[Mapping[str, Any]]):
    """Envs in batches of worlds. An env gets a world of its task's batch at a reset, and keeps it for the task."""

    def __init__(self, config: LiberoWarpConfig, context: EnvContext) -> None:
        from vla_rl.plugins.envs.libero.warp.task_model import HostScenes

        self.num_envs = context.num_envs
        self._config = config
        self._device = torch.device(context.device)
        info, states = describe_env(config.official())
        cameras = {name: (size, size) for name, size in config.cameras.items()}
        # Atomic additions make the order of contacts, and with it their sums, random on a GPU.
        deterministic = self._device.type == "cpu"
        self.info = evolve(info, cameras=cameras, notes=(*info.notes, NOTE), deterministic=deterministic)
        self._states = states
        self.host = HostScenes(config.official())
        self._worlds = config.worlds or ceil(self.num_envs / len(self.info.tasks))
        self._batches: list[WorldBatch] = []
        self._place_of: dict[int, tuple[int, int]] = {}
        """Env -> number of its batch, and world."""
        self._broken: set[int] = set()
        self._faults: dict[int, list[str]] = {}
        self._instructions = [self.info.tasks[0].instruction] * self.num_envs
        self._images = {
            name: torch.zeros(self.num_envs, *size, 3, dtype=torch.uint8, device=self._device)
            for name, size in self.info.cameras.items()
        }
        self._proprioception = torch.zeros(self.num_envs, STATE_DIM, device=self._device)

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return tuple(self._states[split])

    # ------------------------------------------------------------------------------------------------ resets

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        """Start episodes. The state id determines everything; `seed` has no effect."""
        env_ids = [int(env_id) for env_id in to_numpy(env_ids)]
        placed: dict[int, dict[int, EpisodeStart]] = {}
        for env_id, state_id in zip(env_ids, to_numpy(state_ids), strict=True):
            task, start = self.host.find_start(int(state_id))
            number, world = self._assign_world(env_id, task, start)
            placed.setdefault(number, {})[world] = start
            self._instructions[env_id] = task.instruction
            self._broken.discard(env_id)
        for number, starts in placed.items():
            self._batches[number].place(list(starts), list(starts.values()))
        self._observe_batches(placed, env_ids)
        return self._build_observation(env_ids)

    def _assign_world(self, env_id: int, task: LiberoTask, start: EpisodeStart) -> tuple[int, int]:
        """Return batch and world for an episode of a task: those of the env if it played the task before, else a free
        world; for lack of one a new batch."""
        place = self._place_of.get(env_id)
        if place is not None and self._batches[place[0]].task.task == task:
            return place
        taken = {other for env, other in self._place_of.items() if env != env_id}
        of_task = [i for i, batch in enumerate(self._batches) if batch.task.task == task]
        free = ((i, world) for i in of_task for world in range(self._batches[i].num_worlds) if (i, world) not in taken)
        chosen = next(free, None)
        if chosen is None:
            self._batches.append(self._build_batch(task, start, self._worlds))
            chosen = len(self._batches) - 1, 0
        self._place_of[env_id] = chosen
        return chosen

    def _build_batch(self, task: LiberoTask, start: EpisodeStart, num_worlds: int) -> WorldBatch:
        from vla_rl.plugins.envs.libero.warp.batch import WorldBatch
        from vla_rl.plugins.envs.libero.warp.buffers import choose_sizes

        config, model = self._config, self.host.find_model(task)
        sizes = choose_sizes(model.model, start, config.contacts, config.constraints)
        return WorldBatch(model, start, num_worlds, config.cameras, str(self._device), sizes, config.graphs)

    # ------------------------------------------------------------------------------------------------- steps

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        """Execute a chunk. An env whose world breaks counts as having executed nothing, keeps its last observation, and
        is reported by `faults`."""
        actions = torch.as_tensor(actions, dtype=torch.float32).to(self._device, non_blocking=True)
        wanted = {int(env_id) for env_id in to_numpy(active).nonzero()[0]}
        for env_id in wanted & self._broken:
            self._faults.setdefault(env_id, [])  # the fault was reported when it happened
        wanted -= self._broken
        executed, succeeded = np.zeros((2, *actions.shape[:2]), bool)
        of_batch: dict[int, list[int]] = {}
        for env_id in sorted(wanted):
            of_batch.setdefault(self._place_of[env_id][0], []).append(env_id)
        for number, env_ids in of_batch.items():
            self._step_batch(number, env_ids, actions, stop_at_end, executed, succeeded)
        sound = [env_id for env_id in sorted(wanted) if env_id not in self._broken]
        self._observe_batches(of_batch, sound)
        last = (executed.sum(1) - 1).clip(min=0)
        return ChunkResult(
            obs=self._build_observation(range(self.num_envs)),
            rewards=succeeded.astype(np.float32),
            terminated=succeeded.copy(),
            truncated=np.zeros_like(succeeded),
            executed=executed,
            success=succeeded[np.arange(self.num_envs), last],
            succeeded=succeeded,
        )

    def _step_batch(
        self, number: int, env_ids: Sequence[int], actions: Tensor, stop_at_end: bool, executed: Array, succeeded: Array
    ) -> None:
        """Apply a chunk to envs of one batch. Write which actions were executed and which succeeded, bool [N, C]."""
        batch = self._batches[number]
        env_of = {self._place_of[env_id][1]: env_id for env_id in env_ids}
        worlds, rows = list(env_of), list(env_of.values())
        moving = np.zeros(batch.num_worlds, bool)
        moving[worlds] = True
        commands = torch.zeros(actions.shape[1], batch.num_worlds, ACTION_DIM, device=self._device)
        commands[:, self._to_device(worlds)] = actions[self._to_device(rows)].transpose(0, 1)
        for i, command in enumerate(commands):
            success, broken = batch.step(command, moving)
            for world, text in broken.items():
                self._broken.add(env_of[world])
                self._faults.setdefault(env_of[world], []).append(text)
                moving[world] = False
            executed[rows, i], succeeded[rows, i] = moving[worlds], success[worlds]
            if stop_at_end:
                moving &= ~success
            if not moving.any():
                break
        lost = [env_id for env_id in env_ids if env_id in self._broken]
        executed[lost], succeeded[lost] = False, False

    def faults(self) -> Mapping[int, Sequence[str]]:
        faults = self._faults
        self._faults = {}
        return faults

    # ------------------------------------------------------------------------------------------ observations

    def _observe_batches(self, numbers: Any, env_ids: Sequence[int]) -> None:
        """Note images and proprioception of some envs, whose batches are `numbers`."""
        # Earlier observations may still refer to the old tensors.
        self._images = {name: images.clone() for name, images in self._images.items()}
        self._proprioception = self._proprioception.clone()
        for number in numbers:
            rows = [env_id for env_id in env_ids if self._place_of[env_id][0] == number]
            if not rows:
                continue
            worlds = self._to_device([self._place_of[env_id][1] for env_id in rows])
            chosen = self._to_device(rows)
            images, state = self._batches[number].observe()
            for name, of_worlds in images.items():
                self._images[name][chosen] = of_worlds[worlds]
            self._proprioception[chosen] = state[worlds]

    def _build_observation(self, env_ids: Sequence[int]) -> Observation:
        rows = self._to_device(env_ids)
        return Observation(
            images={name: images[rows] for name, images in self._images.items()},
            instructions=tuple(self._instructions[row] for row in env_ids),
            state=self._proprioception[rows],
        )

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        """Return indices on the device, without waiting for it."""
        return torch.tensor(numbers, dtype=torch.int64).to(self._device, non_blocking=True)

    def read_poses(self) -> dict[str, Tensor]:
        """Return the poses that an expert reads, under LIBERO's names, as float32 [N, 3], where all envs play one task
        in one batch: that of the last observation."""
        (batch,) = self._batches
        worlds = [self._place_of[env_id][1] for env_id in range(self.num_envs)]
        return {name: poses[worlds] for name, poses in batch.read_poses().items()}

    # ----------------------------------------------------------------------------------------------- offload

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "places": dict(self._place_of),
            "broken": set(self._broken),
            "instructions": list(self._instructions),
            "batches": [(batch.task.task, batch.num_worlds, batch.snapshot()) for batch in self._batches],
            "images": {name: images.cpu() for name, images in self._images.items()},
            "proprioception": self._proprioception.cpu(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._batches = []
        for task, num_worlds, state in snapshot["batches"]:
            start = self._find_any_start(task)
            self._batches.append(self._build_batch(task, start, num_worlds))
            self._batches[-1].restore(state)
        self._place_of = dict(snapshot["places"])
        self._broken = set(snapshot["broken"])
        self._instructions = list(snapshot["instructions"])
        self._images = {name: images.to(self._device, copy=True) for name, images in snapshot["images"].items()}
        self._proprioception = snapshot["proprioception"].to(self._device, copy=True)

    def _find_any_start(self, task: LiberoTask) -> EpisodeStart:
        """Return a start of a task's episodes."""
        states = (state for of_split in self._states.values() for state in of_split if state.task == task.name)
        return self.host.find_start(next(states).id)[1]

    def close(self) -> None:
        self._batches = []
        self._place_of = {}
        self.host.close()
