"""A simulator whose next frames a world model imagines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from attrs import evolve

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import Noise, derived_seed
from vla_rl.core.types import Array, ArrayOrTensor, ChunkResult, EnvInfo, Observation, ResetState, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.runtime.imagination.worker.episode_files import EpisodeShape
from vla_rl.runtime.imagination.worker.episode_store import EpisodeStore
from vla_rl.toolkit.world_models.windows import followed_by, put_rows

TRIES = 3
"""Number of tries of a trajectory in which the model gives numbers that are not finite, each with different noise."""


class ImaginedEnv(SimEnv):
    """N envs that start from recorded train episodes and continue as the model predicts.

    A reset state is a window of the episode store. The reset's seed keys everything that is drawn, so the envs of a
    group have the same window and different seeds. An env is truncated after `horizon` chunks of actions, and at the
    step limit of the episode that it continues. Episodes after the last `refresh_starts` are no starts.
    """

    def __init__(
        self,
        model: WorldModel,
        store: EpisodeStore,
        info: EnvInfo,
        num_envs: int,
        *,
        horizon: int,
        start: Literal["any", "first"] = "any",
        outcome: Literal["sample", "most likely"] = "sample",
        recent: int | None = None,
        seed: int = 0,
    ) -> None:
        """Wrap a world model.

        Args:
            info: description of the simulator of the recorded episodes, with its step limits.
            recent: start from this many of the newest train episodes; None: from all.
            outcome: how an outcome is chosen from the model's probabilities.
            seed: seed of the run.
        Raises UserError for a store with another simulator's episodes.
        """
        recorded = store.shape
        simulated = EpisodeShape.of(info, recorded.chunk)
        for name in ("cameras", "state_dim", "action_dim"):
            if getattr(recorded, name) != getattr(simulated, name):
                raise UserError(
                    f"the recorder in {store.folder} holds episodes with {name} {getattr(recorded, name)}, and the "
                    f"simulator has {getattr(simulated, name)}; give the simulator that was recorded"
                )
        self.model = model
        self.store = store
        self.num_envs = num_envs
        self.seed = seed
        self.info = evolve(
            info, notes=(*info.notes, "imagined by a world model"), takeovers=False, control_hz=None, extras={}
        )
        self._start = start
        self._outcome = outcome
        self._recent = recent
        self._horizon = horizon * store.shape.chunk
        self._limits = {task.name: task.max_steps for task in info.tasks}
        self._limit = np.full(num_envs, self._horizon)
        self._windows: Windows | None = None
        self._seed = np.zeros(num_envs, np.int64)
        self._steps = np.zeros(num_envs, np.int64)
        self._chunks = np.zeros(num_envs, np.int64)
        self._ids = np.zeros(num_envs, np.int64)
        self._tries = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, bool)
        self._success = np.zeros(num_envs, bool)
        self._faults: dict[int, list[str]] = {}
        self._tried: dict[tuple[int, int], int] = {}
        """(reset state, seed) of a trajectory -> number of times it broke since `refresh_starts`."""
        self.refresh_starts()

    def refresh_starts(self) -> None:
        """Use all episodes that are recorded by now as starts."""
        self._tried.clear()
        self._starts = self.store.start_windows(self._start, newest=self._recent)

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        if split == "eval":
            raise UserError("evaluation is on the real simulator, never on imagined frames")
        return self._starts

    def reset(self, env_ids: ArrayOrTensor, state_ids: ArrayOrTensor, seed: ArrayOrTensor) -> Observation:
        chosen = np.array(to_numpy(env_ids), np.int64)
        ids = np.array(to_numpy(state_ids), np.int64)
        windows = self.store.read_windows(ids, history=self.model.history)
        if self._windows is None:
            self._windows = windows.take(np.zeros(self.num_envs, np.int64))
        self._windows = put_rows(self._windows, chosen, windows)
        self._ids[chosen] = ids
        self._seed[chosen] = to_numpy(seed)
        self._tries[chosen] = [self._tried.get(key, 0) for key in self._trajectory_keys(chosen)]
        self._steps[chosen] = self._chunks[chosen] = 0
        self._over[chosen] = self._success[chosen] = False
        limits = np.array([self._limits[task] for task in self.store.window_tasks(ids)])
        executed_actions = (windows.first + self.model.history - 1) * self.store.shape.chunk
        self._limit[chosen] = np.minimum(self._horizon, np.maximum(limits - executed_actions, 1))
        return self._current_observation(chosen)

    def chunk_step(self, actions: ArrayOrTensor, active: ArrayOrTensor, stop_at_end: bool) -> ChunkResult:
        moves, running = np.array(to_numpy(actions), np.float32), np.array(to_numpy(active), bool)
        count, width = moves.shape[:2]
        rewards, terminated = np.zeros((count, width), np.float32), np.zeros((count, width), bool)
        truncated, executed = np.zeros_like(terminated), np.repeat(running[:, None], width, axis=1)
        left = np.where(running & ~self._over, np.minimum(self._limit - self._steps, width), 0)
        for length in np.unique(left[left > 0]):
            env_ids = np.flatnonzero(left == length)
            for env_id, outcome in zip(env_ids, self._imagine_chunk(env_ids, moves[env_ids, :length]), strict=True):
                won, last = bool(1 <= outcome <= length), int(outcome - 1) % length if outcome else length - 1
                terminated[env_id, last], rewards[env_id, last] = outcome > 0, won
                self._steps[env_id] += last + 1
                truncated[env_id, last] = not outcome and self._steps[env_id] >= self._limit[env_id]
                self._over[env_id] = terminated[env_id, last] or truncated[env_id, last]
                if stop_at_end and self._over[env_id]:
                    executed[env_id, last + 1 :] = False
                self._success[env_id] = won
        return ChunkResult(
            obs=self._current_observation(np.arange(self.num_envs)),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            executed=executed,
            success=self._success.copy(),
        )

    def faults(self) -> Mapping[int, Sequence[str]]:
        faults = self._faults
        self._faults = {}
        return faults

    def _imagine_chunk(self, env_ids: Array, actions: Array) -> Array:
        """Advance these envs by a chunk. Return the outcome class of each, int64 [R]."""
        assert self._windows is not None
        windows = self._windows.take(env_ids)
        keys = [self._noise_keys(env_ids), self._ids[env_ids].tolist(), self._chunks[env_ids].tolist()]
        after = self.model.imagine(windows, actions, Noise(self.seed, "imagination/frames", *keys)).numpy()
        chances = np.array(to_numpy(self.model.outcome(windows, actions, after)), np.float64)
        broken = ~np.isfinite(chances).all(1)
        if after.state is not None:
            broken |= ~np.isfinite(np.asarray(after.state)).all(1)
        for env_id, key in zip(env_ids[broken], self._trajectory_keys(env_ids[broken]), strict=True):
            self._tried[key] = tries = self._tried.get(key, 0) + 1
            self._faults.setdefault(int(env_id), []).append("the world model gave numbers that are not finite")
            if tries == TRIES:
                raise UserError(
                    f"the world model gave numbers that are not finite {TRIES} times in one trajectory, each time with "
                    "other noise: its weights are not sound; continue from an earlier checkpoint with a lower "
                    "learning rate of the world model, or without it"
                )
        # A broken env gets outcome 0 (the episode continues). Its window is not advanced, and the fault that it reports
        # makes its episode run again.
        chances[broken] = np.eye(1, chances.shape[1])
        uniforms = Noise(self.seed, "imagination/outcome", *keys).uniforms()
        drawn: Array = chances.argmax(1)
        if self._outcome == "sample":
            bounds = chances.cumsum(1)
            # Scaled by the sum, which rounding may leave beside 1.
            drawn = (uniforms[:, None] * bounds[:, -1:] >= bounds).sum(1).clip(max=chances.shape[1] - 1)
        width = actions.shape[1]
        last = np.where(drawn > 0, (drawn - 1) % width, width - 1)
        executed = np.arange(width) <= last[:, None]
        moved = followed_by(windows, actions, executed, drawn, after)
        sound = np.flatnonzero(~broken)
        self._windows = put_rows(self._windows, env_ids[sound], moved.take(sound))
        self._chunks[env_ids] += 1
        return drawn

    def _trajectory_keys(self, env_ids: Array) -> list[tuple[int, int]]:
        return list(zip(self._ids[env_ids].tolist(), self._seed[env_ids].tolist(), strict=True))

    def _noise_keys(self, env_ids: Array) -> list[int]:
        """Return the keys of the noise: a trajectory that broke is repeated with different noise."""
        drawn = zip(self._seed[env_ids].tolist(), self._tries[env_ids].tolist(), strict=True)
        return [derived_seed(seed, "tried", tries) if tries else seed for seed, tries in drawn]

    def _current_observation(self, env_ids: Array) -> Observation:
        if self._windows is None:
            raise RuntimeError("no env has been reset")
        windows = self._windows
        return Observation(
            images={camera: frames[env_ids, -1] for camera, frames in windows.images.items()},
            instructions=tuple(windows.instructions[env_id] for env_id in env_ids),
            state=windows.state[env_ids, -1] if self.info.state_dim else None,
        )
