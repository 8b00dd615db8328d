"""Recording of a lane's episodes for the world model, in the simulators' process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field

from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.runtime.imagination.interfaces import WorldModelRecordingInterface
from vla_rl.runtime.imagination.messages import RecordedEpisode
from vla_rl.runtime.messages.requests import EpisodeRequest


@define(eq=False)
class _Running:
    """Recording of a running episode."""

    start: EpisodeRequest
    seed: int
    frames: list[Observation]
    """Observations, each of one env."""
    actions: list[Array] = field(factory=list)
    executed: list[Array] = field(factory=list)
    outcomes: list[int] = field(factory=list)


class WorldModelObserver:
    """A `RolloutObserver` of a lane without auto_reset, where a ticket is an episode."""

    def __init__(self, recordings: dict[int, RecordedEpisode]) -> None:
        """Create an observer that puts finished episodes into `recordings`, by the numbers of their tickets."""
        self.recordings = recordings
        self._running: dict[int, _Running] = {}

    def on_reset(self, env_ids: Array, starts: Sequence[EpisodeRequest], seeds: Array, obs: Observation) -> None:
        for place, (env_id, start) in enumerate(zip(env_ids.tolist(), starts, strict=True)):
            self._running[env_id] = _Running(start, int(seeds[place]), [_copy_observation(obs, place)])

    def on_chunk(
        self, env_ids: Array, actions: Array, record: Mapping[str, Array], success: Array, obs: Observation
    ) -> None:
        ended = record["terminated"] | record["truncated"]
        for env_id in env_ids.tolist():
            running, width = self._running[env_id], actions.shape[1]
            running.frames.append(_copy_observation(obs, env_id))
            running.actions.append(actions[env_id].copy())
            running.executed.append(record["valid"][env_id].copy())
            at = int(record["terminated"][env_id].argmax())
            outcome = 1 + at if success[env_id] else 1 + width + at
            running.outcomes.append(outcome if record["terminated"][env_id].any() else 0)
            if ended[env_id].any():
                self.recordings[running.start.number] = _build_episode(self._running.pop(env_id))


class WorldModelRecordings(WorldModelRecordingInterface):
    """Role of each worker with simulators that holds its recorded episodes until the world model takes them."""

    def __init__(self) -> None:
        self.ended: dict[int, RecordedEpisode] = {}
        """Number of the ticket -> its episode. With rollouts ahead of training, episodes of later steps are among
        them."""

    def take_episodes(self, last: int) -> list[RecordedEpisode]:
        return [self.ended.pop(number) for number in sorted(self.ended.copy()) if number <= last]


def _copy_observation(obs: Observation, env_id: int) -> Observation:
    """Return the observation of one env in separate memory, because a simulator may write into what it returned."""
    return obs.take(np.array([env_id])).numpy()


def _build_episode(running: _Running) -> RecordedEpisode:
    start, obs = running.start, Observation.concat(running.frames)
    state = np.zeros((len(obs), 0), np.float32) if obs.state is None else np.asarray(obs.state, np.float32)
    return RecordedEpisode(
        images={camera: to_numpy(frames) for camera, frames in obs.images.items()},
        state=state,
        actions=np.stack(running.actions),
        executed=np.stack(running.executed),
        outcomes=np.array(running.outcomes, np.int64),
        instruction=obs.instructions[0],
        task=start.state.task,
        reset_state=start.state.id,
        number=start.number,
        seed=running.seed,
    )
