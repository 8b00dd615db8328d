"""Makes recordings of the episodes of a lane, where their frames are made, and keeps them for the world model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field

from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.runtime.comm.interfaces import WorldModelRecordingInterface
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.messages.world_model import RecordedEpisode


@define(eq=False)
class _Running:
    start: EpisodeRequest
    seed: int
    frames: list[Observation]
    """Of one row each."""
    actions: list[Array] = field(factory=list)
    executed: list[Array] = field(factory=list)
    outcomes: list[int] = field(factory=list)


class WorldModelObserver:
    """A `Watch` of a lane without auto_reset, where a ticket is an episode."""

    def __init__(self, recordings: dict[int, RecordedEpisode]) -> None:
        """`recordings`: where those of tickets that ended are put, by their numbers."""
        self.recordings = recordings
        self._running: dict[int, _Running] = {}

    def began(self, rows: Array, starts: Sequence[EpisodeRequest], seeds: Array, obs: Observation) -> None:
        for place, (row, start) in enumerate(zip(rows.tolist(), starts, strict=True)):
            self._running[row] = _Running(start, int(seeds[place]), [_copy(obs, place)])

    def moved(self, rows: Array, actions: Array, record: Mapping[str, Array], success: Array, obs: Observation) -> None:
        ended = record["terminated"] | record["truncated"]
        for row in rows.tolist():
            running, width = self._running[row], actions.shape[1]
            running.frames.append(_copy(obs, row))
            running.actions.append(actions[row].copy())
            running.executed.append(record["valid"][row].copy())
            at = int(record["terminated"][row].argmax())
            outcome = 1 + at if success[row] else 1 + width + at
            running.outcomes.append(outcome if record["terminated"][row].any() else 0)
            if ended[row].any():
                self.recordings[running.start.number] = _recording(self._running.pop(row))


class WorldModelRecordings(WorldModelRecordingInterface):
    """A role of each worker with simulators: episodes of tickets that ended there."""

    def __init__(self) -> None:
        self.ended: dict[int, RecordedEpisode] = {}
        """By the numbers of their tickets; those of later steps too, where rollouts run ahead."""

    def tap(self) -> WorldModelObserver:
        """For the episodes of a lane."""
        return WorldModelObserver(self.ended)

    def take(self, last: int) -> list[RecordedEpisode]:
        return [self.ended.pop(number) for number in sorted(self.ended.copy()) if number <= last]


def _copy(obs: Observation, row: int) -> Observation:
    """Of one row, in memory of its own: a simulator may write into what it returned."""
    taken = obs.take(np.array([row])).numpy()
    images = {camera: np.array(frames) for camera, frames in taken.images.items()}
    state = None if taken.state is None else np.array(taken.state, np.float32)
    return Observation(images=images, instructions=taken.instructions, state=state)


def _recording(running: _Running) -> RecordedEpisode:
    start, seen = running.start, Observation.concat(running.frames)
    state = np.zeros((len(seen), 0), np.float32) if seen.state is None else to_numpy(seen.state)
    return RecordedEpisode(
        images={camera: to_numpy(frames) for camera, frames in seen.images.items()},
        state=state,
        actions=np.stack(running.actions),
        executed=np.stack(running.executed),
        outcomes=np.array(running.outcomes, np.int64),
        instruction=seen.instructions[0],
        task=start.state.task,
        reset_state=start.state.id,
        number=start.number,
        seed=running.seed,
    )
