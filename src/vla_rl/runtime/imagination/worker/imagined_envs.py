"""The envs of imagination, in the world model's worker: apart from the simulators', so that both may run at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.runtime.imagination.interfaces import (
    IMAGINED,
    MEASURING,
    RECORDINGS,
    TRAINING,
    WORLD_MODEL,
    ImaginationRoles,
    ImaginedEnvInterface,
    RecordedEpisode,
    WorldModelRecordingInterface,
)
from vla_rl.runtime.imagination.worker.imagined_env import ImaginedEnv
from vla_rl.runtime.imagination.worker.world_model_worker import WorldModelWorker
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest
from vla_rl.runtime.workers.added_roles import BuiltRoles, RoleContext
from vla_rl.runtime.workers.env.env_worker import EnvLanes, in_host_memory
from vla_rl.runtime.workers.env.episodes import Bootstrap, Episodes


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
        """Number of the ticket -> its episode. Rollouts ahead add episodes of later steps."""

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


RECENT = 512
"""Newest real episodes that imagination starts from: eight rollouts of 64 episodes, whose states the present policy
still reaches. It matters only where a run keeps more (`imagination.buffer`), and no run has needed another number."""


class ImaginedEnvs(EnvLanes, ImaginedEnvInterface):
    """The imagined envs of all lanes (role `IMAGINED`). Each lane has envs for training (purpose `TRAINING`), and
    envs that measure the over-estimation of success (purpose `MEASURING`)."""

    def __init__(self, world_model: WorldModelWorker, num_envs: Mapping[int, int], bootstrap: Bootstrap) -> None:
        """Create the envs.

        Args:
            num_envs: lane -> number of its envs, for all lanes of the run.
            bootstrap: as for Episodes.
        """
        spec = world_model.spec
        super().__init__(spec.env.type, spec.runtime.max_faults)
        self._world_model = world_model
        training: dict[int, Episodes] = {}
        measuring: dict[int, Episodes] = {}
        for lane, count in num_envs.items():
            section = world_model.section
            env = self._make_env(count, horizon=section.horizon, start=section.start)
            world_model.training_envs.append(env)
            training[lane] = self._make_episodes(env, bootstrap)
            whole_episodes = self._make_env(count, horizon=world_model.store.shape.longest, start="first")
            measuring[lane] = self._make_episodes(whole_episodes, "none")
        self.episodes_of |= {TRAINING: training, MEASURING: measuring}

    def _make_env(self, count: int, **settings: Any) -> ImaginedEnv:
        world_model = self._world_model
        section = world_model.section
        return ImaginedEnv(
            world_model.model,
            world_model.store,
            world_model.info,
            count,
            outcome=section.outcome,
            recent=RECENT,
            seed=world_model.spec.seed,
            **settings,
        )

    def _make_episodes(self, env: ImaginedEnv, bootstrap: Bootstrap) -> Episodes:
        spec = self._world_model.spec
        assert spec.world_model is not None
        return Episodes(
            env,
            name=f"{spec.env.type} (imagined by {spec.world_model.type})",
            seed=spec.seed,
            chunk=spec.rollout.chunk,
            reward=spec.rollout.reward,
            reward_coef=spec.rollout.reward_coef,
            bootstrap=bootstrap,
            on_fault=lambda text, state: self.on_fault(text),
        )

    def begin(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        self._check_version(tickets)
        return in_host_memory(self.begin_lane(lane, purpose, tickets))

    def step(self, lane: int, actions: Any, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        self._check_version(tickets)
        return in_host_memory(self.step_lane(lane, actions, tickets))

    def _check_version(self, tickets: Sequence[EpisodeRequest]) -> None:
        """Raises RuntimeError for a ticket that belongs to another version of the world model than the current one."""
        version = self._world_model.counts.updates
        for ticket in tickets:
            if ticket.world != version:
                raise RuntimeError(f"ticket {ticket.number} is of world model version {ticket.world}, not {version}")


def build_roles(context: RoleContext, settings: ImaginationRoles) -> BuiltRoles:
    """Build the recordings of a worker and, in the first, the world model and its envs."""
    assert context.spec.world_model is not None
    recordings = WorldModelRecordings()
    roles: dict[str, Any] = {RECORDINGS: recordings}
    if settings.lanes is not None:
        world_model = WorldModelWorker(context, settings.folder)
        roles[WORLD_MODEL] = world_model
        roles[IMAGINED] = ImaginedEnvs(world_model, settings.lanes, context.bootstrap)
    plugin = f"world model {context.spec.world_model.type!r}"
    return BuiltRoles(roles=roles, plugin=plugin, make_observer=lambda: WorldModelObserver(recordings.ended))
