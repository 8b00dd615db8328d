"""What the running episode of each row has brought so far: masks, rewards, success."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from vla_rl.core.types import Array, ChunkResult, Episode, to_numpy
from vla_rl.runtime.messages.requests import EnvError, EpisodeRequest


class EpisodeStatistics:
    def __init__(
        self,
        rows: int,
        *,
        name: str,
        chunk: int,
        ignore_terminations: bool,
        reward: Literal["raw", "relative"],
        reward_coef: float,
    ):
        self.rows, self.name, self.chunk = rows, name, chunk
        self.ignore_terminations, self.reward, self.reward_coef = ignore_terminations, reward, reward_coef
        self.steps = np.zeros(rows, np.int64)  # valid ones
        self.chunks = np.zeros(rows, np.int64)
        self.total = np.zeros(rows, np.float64)
        self.last_reward = np.zeros(rows, np.float32)
        self.once = np.zeros(rows, bool)
        self.at_end = np.zeros(rows, bool)

    def open(self, row: Any) -> None:
        """An episode begins."""
        self.steps[row] = self.chunks[row] = 0
        self.total[row], self.last_reward[row], self.once[row] = 0.0, 0.0, False

    def add(
        self, active: Array, remaining: Array, result: ChunkResult, broken: Array
    ) -> tuple[dict[str, Array], Array, int]:
        """A chunk step of the active rows (bool [N]), with so many actions before each one's limit (int64 [N]).
        -> its masks and rewards, padded to [N, C]; which rows' episodes ended; actions that were executed.
        Raises EnvError where a row did not move."""
        width = to_numpy(result.rewards).shape[1]
        rewards = to_numpy(result.rewards).astype(np.float32)
        terminated = to_numpy(result.terminated).astype(bool)
        truncated = to_numpy(result.truncated).astype(bool)
        executed = to_numpy(result.executed).astype(bool)
        executed[broken] = False
        idle = active & ~executed.any(1)
        idle[broken] = False
        if idle.any():
            rows = np.flatnonzero(idle).tolist()
            raise EnvError(f"env {self.name!r}: chunk_step executed no action in the active rows {rows}")
        if self.ignore_terminations:
            terminated = np.zeros_like(terminated)
        limit = active[:, None] & (remaining[:, None] == np.arange(1, width + 1))
        truncated = (truncated | limit) & ~terminated
        ended = terminated | truncated
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
            last_valid = np.maximum(valid.shape[1] - 1 - valid[:, ::-1].argmax(1), 0)
            self.at_end = to_numpy(result.succeeded).astype(bool)[np.arange(self.rows), last_valid]
        self.steps += valid.sum(1)
        self.chunks += active
        self.total += rewards.sum(1)

        record = {"rewards": rewards, "terminated": terminated, "truncated": truncated, "valid": valid}
        if width < self.chunk:
            record = {key: np.pad(array, ((0, 0), (0, self.chunk - width))) for key, array in record.items()}
        return record, (terminated | truncated).any(1), int(executed.sum())

    def close(self, row: int, start: EpisodeRequest, truncated: bool) -> Episode:
        """An episode ended."""
        return Episode(
            number=start.key,
            episode=start.episode,
            task=start.state.task,
            state=start.state.id,
            steps=int(self.steps[row]),
            total_reward=float(self.total[row]),
            success_once=bool(self.once[row]),
            success_at_end=bool(self.at_end[row]),
            truncated=truncated,
        )
