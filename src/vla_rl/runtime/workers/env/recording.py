"""Episodes that are being recorded, where the simulators are.

An image is compressed as soon as it is drawn, and an episode that ended goes to a file without a name, which ends with
its process. So memory holds the episodes that are being played, compressed, and nothing of those that were.
"""

from __future__ import annotations

import pickle
import tempfile
from threading import Lock
from typing import Any

import numpy as np
from attrs import define, field

from vla_rl.core.types import Array, ChunkResult, EnvInfo, Episode, Observation, to_numpy
from vla_rl.runtime.messages.requests import EpisodeRequest, RecordingKey
from vla_rl.toolkit.data.recording import Recording, RecordSettings, png


@define
class RecordingStore:
    """Recordings in a file, in the order in which they come; it is emptied when nobody wants any of them."""

    _file: Any = field(factory=tempfile.TemporaryFile, init=False)
    _places: dict[RecordingKey, tuple[int, int]] = field(factory=dict, init=False)
    _lock: Any = field(factory=Lock, init=False)

    def put(self, key: RecordingKey, recording: Recording) -> None:
        data = pickle.dumps(recording, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._places[key] = self._file.seek(0, 2), len(data)
            self._file.write(data)

    def keys(self) -> list[RecordingKey]:
        with self._lock:
            return list(self._places)

    def get(self, key: RecordingKey) -> Recording:
        with self._lock:
            start, length = self._places[key]
            self._file.seek(start)
            recording: Recording = pickle.loads(self._file.read(length))  # noqa: S301 - this process wrote it
            return recording

    def forget(self, last: int | None) -> None:
        """Those of tickets up to this number; None: all."""
        with self._lock:
            self._places = {key: p for key, p in self._places.items() if last is not None and key[0] > last}
            if not self._places:
                self._file.seek(0)
                self._file.truncate()


@define(kw_only=True)
class _Take:
    images: dict[str, list[bytes]]
    states: list[Array] = field(factory=list)
    actions: list[Array] = field(factory=list)
    rewards: list[float] = field(factory=list)
    executed: list[int] = field(factory=list)
    instruction: str


class EpisodeRecorder:
    """Of one lane: what its rows are recording."""

    def __init__(self, info: EnvInfo, settings: RecordSettings, spool: RecordingStore) -> None:
        self.info, self.settings, self.spool = info, settings, spool
        self.by_step = settings.rows == "steps"
        self._takes: dict[int, _Take] = {}

    def clear(self) -> None:
        """Forget what is being recorded."""
        self._takes.clear()

    def wants_steps(self, active: Array) -> bool:
        """Whether one of the active rows (bool [N]) records each environment step."""
        return self.by_step and any(active[row] for row in self._takes)

    def begin(self, row: int, start: EpisodeRequest, obs: Observation, position: int) -> None:
        """An episode begins in a row, whose observation is at this position."""
        self._takes.pop(row, None)
        if start.recorded:
            images: dict[str, list[bytes]] = {camera: [] for camera in self.info.cameras}
            self._takes[row] = _Take(images=images, instruction=obs.instructions[position])
            self._see(row, obs, position)

    def see(self, rows: Array, obs: Observation) -> None:
        """What the next action, or chunk, of these rows (int64) follows on; `obs`: of all rows."""
        for row in rows.tolist():
            if row in self._takes:
                self._see(row, obs, row)

    def _see(self, row: int, obs: Observation, position: int) -> None:
        take = self._takes[row]
        for camera, images in take.images.items():
            images.append(png(to_numpy(obs.images[camera][position])))
        state = np.zeros(0, np.float32) if obs.state is None else to_numpy(obs.state[position])
        take.states.append(np.array(state, np.float32))

    def add(self, rows: Array, chosen: Array, result: ChunkResult, valid: Array) -> None:
        """What these rows (int64) did: float32 [N, C, A] of all rows, and which actions count, bool [N, C]."""
        rewards = to_numpy(result.rewards)
        for row in [row for row in rows.tolist() if row in self._takes]:
            take, count = self._takes[row], int(valid[row].sum())
            if self.by_step:
                take.actions += list(chosen[row, :count])
                take.rewards += rewards[row, :count].tolist()
            else:
                take.actions.append(chosen[row])
                take.rewards.append(float(rewards[row, :count].sum()))
                take.executed.append(count)
                self._see(row, result.obs, row)

    def end(self, row: int, episode: Episode) -> None:
        """A row's episode ended."""
        take = self._takes.pop(row, None)
        if take is None or not self.settings.keeps(episode.success_once):
            return
        n = len(take.actions)
        self.spool.put(
            (episode.number, episode.episode),
            Recording(
                images={camera: tuple(images[:n]) for camera, images in take.images.items()},
                sizes=dict(self.info.cameras),
                state=np.stack(take.states[:n]),
                actions=np.stack(take.actions).astype(np.float32),
                instruction=take.instruction,
                task=episode.task,
                success=episode.success_once,
                rewards=np.array(take.rewards, np.float32),
                executed=None if self.by_step else np.array(take.executed, np.int64),
                identity=f"state {episode.state}",
            ),
        )
