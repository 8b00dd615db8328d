"""Records of N envs' running episodes and tickets: statistics, masks and rewards of chunks, and trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np
from attrs import define

from vla_rl.core.types import ActionSource, Array, ChunkResult, Episode, to_numpy
from vla_rl.runtime.messages.requests import EnvError, EnvTrajectory, EpisodeRequest
from vla_rl.toolkit.data.recording import Recording

ACTIONS = "actions"
"""Field of the executed actions; kept for persistent streams, and not part of a trajectory."""


@define
class StepCounts:
    """What the calls of a lane's simulator cost since its last request."""

    seconds: float = 0.0
    """Seconds that the simulator took."""
    env_steps: int = 0
    """Number of actions that it executed for tickets."""
    replayed: int = 0
    """Number of actions that it executed again, to bring streams back to where they were."""
    restarted: int = 0
    """Number of streams that could not be brought back and started a new episode."""

    def reset(self) -> None:
        self.seconds = 0.0
        self.env_steps = 0
        self.replayed = 0
        self.restarted = 0


@define(eq=False, slots=False)
class EpisodeStatistics:
    """Statistics of the running episodes of N envs; `add_chunk` derives the masks and rewards of a chunk step."""

    num_envs: int
    name: str
    chunk: int
    ignore_terminations: bool
    reward: Literal["raw", "relative"]
    reward_coef: float
    extras: Mapping[str, str] = MappingProxyType({})
    """Dimensions of further numbers, as `EnvInfo.extras`."""

    def __attrs_post_init__(self) -> None:
        num_envs = self.num_envs
        self.limit = np.zeros(num_envs, np.int64)
        """Step limit of each episode."""
        self.steps = np.zeros(num_envs, np.int64)  # only valid ones count
        self.chunks = np.zeros(num_envs, np.int64)
        self.total = np.zeros(num_envs, np.float64)
        self.last_reward = np.zeros(num_envs, np.float32)
        self.once = np.zeros(num_envs, bool)
        self.at_end = np.zeros(num_envs, bool)
        self.interventions: Array | None = None
        """Valid steps of each episode whose action another source chose, int64 [N]; None: no one can take over."""
        self.late_actions: Array | None = None
        """Valid steps of each episode that began late, int64 [N]; None: not in real time."""

    def reset_episodes(self, env_ids: Array) -> None:
        """Reset the statistics of envs whose episodes begin."""
        self.steps[env_ids] = 0
        self.chunks[env_ids] = 0
        self.total[env_ids] = 0.0
        self.last_reward[env_ids] = 0.0
        self.once[env_ids] = False
        if self.interventions is not None:
            self.interventions[env_ids] = 0
        if self.late_actions is not None:
            self.late_actions[env_ids] = 0

    def remaining_actions(self, active: Array) -> Array:
        """Return the number of actions before the step limit, int64 [N]; 0 for envs that are not active."""
        return np.where(active, self.limit - self.steps, 0)

    def add_chunk(
        self, active: Array, remaining: Array, result: ChunkResult, broken: Array
    ) -> tuple[dict[str, Array], Array, int]:
        """Add a chunk step of the active envs, bool [N].

        Args:
            remaining: actions before each env's step limit, int64 [N].
            broken: indices of the envs that broke in this chunk.
        Raises EnvError where an env executed no action.
        Returns: (masks and rewards, padded to [N, C]; whose episodes ended, bool [N]; number of executed actions).
        """
        width = to_numpy(result.rewards).shape[1]
        rewards = to_numpy(result.rewards).astype(np.float32)
        terminated = to_numpy(result.terminated).astype(bool)
        truncated = to_numpy(result.truncated).astype(bool)
        executed = to_numpy(result.executed).astype(bool)
        executed[broken] = False
        idle = active & ~executed.any(1)
        idle[broken] = False
        if idle.any():
            env_ids = np.flatnonzero(idle).tolist()
            raise EnvError(f"env {self.name!r}: chunk_step executed no action in the active envs {env_ids}")
        if self.ignore_terminations:
            terminated = np.zeros_like(terminated)
        limit = active[:, None] & (remaining[:, None] == np.arange(1, width + 1))
        # An episode that terminates with the last action before its limit is not cut off.
        truncated = (truncated | limit) & ~terminated
        ended = terminated | truncated
        # The action that ends an episode counts, and none after it.
        valid = executed & ((np.cumsum(ended, 1) - ended) == 0)
        valid[~active] = False

        if self.reward == "relative":
            previous = np.concatenate([self.last_reward[:, None], rewards[:, :-1]], axis=1)
            self.last_reward = np.where(active, rewards[:, -1], self.last_reward)
            rewards = rewards - previous
        rewards = np.where(valid, rewards * np.float32(self.reward_coef), np.float32(0))
        terminated, truncated = terminated & valid, truncated & valid

        success = to_numpy(result.success).astype(bool)
        solved = (to_numpy(result.succeeded).astype(bool) & valid).any(1) if result.succeeded is not None else success
        self.once |= solved & active
        self.at_end = success
        if result.succeeded is not None:
            # argmax finds the first True of the mirrored mask, which is the last one of the mask.
            last_valid = np.maximum(valid.shape[1] - 1 - valid[:, ::-1].argmax(1), 0)
            self.at_end = to_numpy(result.succeeded).astype(bool)[np.arange(self.num_envs), last_valid]
        self.steps += valid.sum(1)
        self.chunks += active
        self.total += rewards.sum(1)

        record = {"rewards": rewards, "terminated": terminated, "truncated": truncated, "valid": valid}
        if result.source is not None:
            record["source"] = to_numpy(result.source)
            record["executed_actions"] = to_numpy(result.executed_actions)
            if self.interventions is None:
                self.interventions = np.zeros(self.num_envs, np.int64)
            self.interventions += (valid & (record["source"] != ActionSource.POLICY)).sum(1)
        if result.late is not None:
            if self.late_actions is None:
                self.late_actions = np.zeros(self.num_envs, np.int64)
            self.late_actions += (valid & to_numpy(result.late)).sum(1)
        unmasked = {name: to_numpy(array) for name, array in result.extras.items()}
        for name in [name for name, dims in self.extras.items() if dims.startswith("C")]:
            array = unmasked.pop(name)
            record[name] = np.where(valid.reshape(*valid.shape, *[1] * (array.ndim - 2)), array, np.float32(0))
        if width < self.chunk:
            missing = self.chunk - width
            record = {
                key: np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)])
                for key, array in record.items()
            }
        record |= unmasked
        return record, (terminated | truncated).any(1), int(executed.sum())

    def finish_episode(self, env_id: int, request: EpisodeRequest, truncated: bool) -> Episode:
        """Return the result of an env's finished episode."""
        return Episode(
            number=request.random_key,
            episode=request.episode,
            task=request.state.task,
            state=request.state.id,
            steps=int(self.steps[env_id]),
            total_reward=float(self.total[env_id]),
            success_once=bool(self.once[env_id]),
            success_at_end=bool(self.at_end[env_id]),
            truncated=truncated,
            interventions=None if self.interventions is None else int(self.interventions[env_id]),
            late_actions=None if self.late_actions is None else int(self.late_actions[env_id]),
        )


class RunningTrajectories:
    """Trajectories of the running tickets of N envs. A chunk step of all envs is one row of each field's array, so it
    costs as many copies as there are fields, whatever N is. The record of an env's ticket is a slice of its column."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.clear()

    def clear(self) -> None:
        """Drop all trajectories."""
        self._rows: dict[str, Array] = {}
        """Field -> array [capacity, N, ...]; its first `_count` rows are in use."""
        self._count = 0
        self._first = np.zeros(self.num_envs, np.int64)
        """Row of the first chunk step of each env's ticket."""
        self._episode_first = np.zeros(self.num_envs, np.int64)
        """Row at which the running episode of each env's ticket began, or was continued."""
        self._runs = np.zeros(self.num_envs, bool)
        """Envs that run a ticket."""
        self.episodes: list[list[Episode]] = [[] for _ in range(self.num_envs)]
        """Episodes of the running ticket that ended."""

    def begin_tickets(self, env_ids: Array) -> None:
        self._runs[env_ids] = True
        self._first[env_ids] = self._count
        self._episode_first[env_ids] = self._count
        for env_id in env_ids.tolist():
            self.episodes[env_id] = []

    def begin_episodes(self, env_ids: Array | int) -> None:
        """Note that the next chunk step of these envs is the first one of an episode."""
        self._episode_first[env_ids] = self._count

    def add_chunk(self, record: dict[str, Array]) -> None:
        """Add the record of a chunk step of all envs that run a ticket; arrays are of all envs, [N, ...]."""
        if not self._rows:
            self._rows = {key: np.empty((8, *array.shape), array.dtype) for key, array in record.items()}
        if self._count == len(next(iter(self._rows.values()))):
            self._make_room()
        if record.keys() != self._rows.keys():
            raise EnvError(f"a chunk step reports {sorted(record)}, and those before it {sorted(self._rows)}")
        for key, array in record.items():
            self._rows[key][self._count] = array
        self._count += 1

    def _make_room(self) -> None:
        """Drop the rows before the first running ticket, and double the capacity if most rows are left."""
        start = int(self._first[self._runs].min(initial=self._count))
        count = self._count - start
        for key, rows in self._rows.items():
            grown = rows if count <= len(rows) // 2 else np.empty((2 * len(rows), *rows.shape[1:]), rows.dtype)
            grown[:count] = rows[start : self._count].copy()
            self._rows[key] = grown
        self._count = count
        self._first -= start
        self._episode_first -= start

    def drop_attempt(self, env_id: int) -> int:
        """Drop the chunk steps of the running episode. Return how many of the ticket remain."""
        first = self._first[env_id]
        remaining = int(self._episode_first[env_id] - first)
        start = self._count - remaining
        for rows in self._rows.values():  # so that the ticket's rows stay consecutive
            rows[start : self._count, env_id] = rows[first : first + remaining, env_id].copy()
        self._first[env_id] = start
        self._episode_first[env_id] = self._count
        return remaining

    def ticket_lengths(self, env_ids: Array) -> Array:
        """Return the number of chunk steps of each of these envs' tickets, int64."""
        lengths: Array = self._count - self._first[env_ids]
        return lengths

    def episode_actions(self, env_id: int) -> Array:
        """Return the actions that the ticket executed in its running episode, float32 [T, C, A]."""
        return self._rows[ACTIONS][self._episode_first[env_id] : self._count, env_id].copy()

    def end_ticket(
        self,
        env_id: int,
        request: EpisodeRequest,
        frames: dict[str, Array] | None,
        recording: Recording | None,
        cursor: EpisodeRequest | None,
    ) -> EnvTrajectory:
        """Return the trajectory of an env's finished ticket.

        Args:
            request: request of its last episode.
            frames: frames of the last episode that keeps frames.
            recording: recording of its one episode.
            cursor: where the ticket's stream continues.
        """
        self._runs[env_id] = False
        first = self._first[env_id]
        return EnvTrajectory(
            number=request.number,
            record={
                key: rows[first : self._count, env_id].copy() for key, rows in self._rows.items() if key != ACTIONS
            },
            episodes=tuple(self.episodes[env_id]),
            frames=frames,
            recording=recording,
            after=cursor,
            world=request.world,
        )
