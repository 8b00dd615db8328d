"""LIBERO as a batch of rows, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import ChunkResult, Context, EnvInfo, Observation, ResetState, TaskInfo, to_numpy
from vla_rl.plugins.envs.libero import LiberoConfig
from vla_rl.plugins.envs.libero.expert import recipe
from vla_rl.plugins.envs.libero.rows import ACTION_DIM, FIRST_TRAIN, IDS_PER_TASK, STATE_DIM, UNTOUCHED, MakeRow
from vla_rl.plugins.envs.libero.suites import Suite

if TYPE_CHECKING:
    from vla_rl.core.types import Array

T = TypeVar("T")


class LiberoEnv(SimEnv):
    """N rows of tasks of one suite. Rows are built at their first reset (seconds), and again when the task changes."""

    def __init__(self, config: LiberoConfig, context: Context) -> None:
        os.environ.setdefault("MUJOCO_GL", "egl")
        self._config = config
        self._suite = Suite(config.suite)
        tasks = self._suite.select(config.tasks)
        max_steps = config.max_steps or self._suite.max_steps
        self.num_envs, self._chunk = context.num_envs, context.chunk
        self.info = EnvInfo(
            cameras={name: (size, size) for name, size in config.cameras.items()},
            state_dim=STATE_DIM,
            action_low=(-1.0,) * ACTION_DIM,
            action_high=(1.0,) * ACTION_DIM,
            tasks=tuple(TaskInfo(name=t.name, instruction=t.instruction, max_steps=max_steps) for t in tasks),
        )
        self._tasks = {task.index: task for task in tasks}
        self._playing = [tasks[0]] * self.num_envs
        apart = self.num_envs > 1 if config.subprocess is None else config.subprocess
        rows = [MakeRow(config, self._chunk, i, os.getpid()) for i in range(self.num_envs)]
        self._rows: AsyncVectorEnv[Any, Any] | SyncVectorEnv[Any, Any] = (
            AsyncVectorEnv(rows, context="forkserver", autoreset_mode=AutoresetMode.DISABLED)
            if apart
            else SyncVectorEnv(rows, autoreset_mode=AutoresetMode.DISABLED)
        )

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        """ "eval": the official initial states (50 a task). "train": `train_states` a task, drawn from the regions in
        which the task's own definition places things."""
        states = []
        for index, task in self._tasks.items():
            first = index * IDS_PER_TASK
            if split == "eval":
                ids = range(first, first + len(self._suite.initial_states(index)))
            else:
                ids = range(first + FIRST_TRAIN, first + FIRST_TRAIN + self._config.train_states)
            states += [ResetState(id=i, task=task.name) for i in ids]
        return tuple(states)

    def reset(self, rows: Array, state_ids: Array, seed: Array) -> Observation:
        """A state id fixes everything; `seed` changes nothing."""
        rows, ids = to_numpy(rows), np.full(self.num_envs, UNTOUCHED, np.int64)
        ids[rows] = to_numpy(state_ids)
        for row in rows:
            self._playing[row] = self._tasks[int(ids[row]) // IDS_PER_TASK]
        observation, _ = self._ask(lambda: self._rows.reset(options={"state_ids": ids}))
        return self._observation(observation).take(rows)

    def chunk_step(self, actions: Array, active: Array, stop_at_end: bool) -> ChunkResult:
        batch = {
            "actions": np.asarray(to_numpy(actions), np.float32),
            "active": np.asarray(to_numpy(active), bool),
            "stop_at_end": np.full(self.num_envs, stop_at_end),
        }
        observation, _, _, _, info = self._ask(lambda: self._rows.step(batch))
        executed, succeeded = info["executed"], info["succeeded"]
        last = np.maximum(executed.sum(1) - 1, 0)
        return ChunkResult(
            obs=self._observation(observation),
            rewards=info["rewards"],
            terminated=succeeded,
            truncated=np.zeros_like(succeeded),
            executed=executed,
            success=succeeded[np.arange(self.num_envs), last],
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Array:
        for task in self._playing:
            recipe(self._suite.name, task.index, task.instruction)  # raises for a task without, before a row does
        return np.stack(self._ask(lambda: self._rows.call("expert_chunk")))

    def close(self) -> bool:
        processes = getattr(self._rows, "processes", [])
        for process in processes:  # rows hold nothing worth a farewell, and one that hangs would not answer
            process.kill()
        for process in processes:
            process.join()
        if processes:
            self._rows.closed = True
        self._rows.close()
        return True

    def _observation(self, observation: dict[str, Array]) -> Observation:
        images = {name: observation[name] for name in self._config.cameras}
        instructions = tuple(task.instruction for task in self._playing)
        return Observation(images=images, instructions=instructions, state=observation["state"])

    def _ask(self, request: Callable[[], T]) -> T:
        """Run a request to all rows; say which row died, should one have."""
        try:
            return request()
        except (EOFError, ConnectionError) as error:
            processes = getattr(self._rows, "processes", [])
            wait([process.sentinel for process in processes], timeout=5.0)
            dead = ", ".join(f"row {i} (exit code {p.exitcode})" for i, p in enumerate(processes) if not p.is_alive())
            raise RuntimeError(f"a LIBERO simulator process died: {dead}; -9 is what a lack of memory gives") from error
