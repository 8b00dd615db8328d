"""The envs in which policies train in imagination, in the worker of the world model. They are separate from the
simulators' envs, so that a rollout may run at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.runtime.imagination.interfaces import (
    IMAGINED,
    MEASURING,
    RECORDINGS,
    TRAINING,
    WORLD_MODEL,
    ImaginedEnvInterface,
)
from vla_rl.runtime.imagination.messages import ImaginationRoles
from vla_rl.runtime.imagination.worker.imagined_env import ImaginedEnv
from vla_rl.runtime.imagination.worker.recording import WorldModelObserver, WorldModelRecordings
from vla_rl.runtime.imagination.worker.world_model_worker import WorldModelWorker
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest
from vla_rl.runtime.workers.added_roles import BuiltRoles, RoleContext
from vla_rl.runtime.workers.env.envs import EnvLanes, in_host_memory
from vla_rl.runtime.workers.env.episodes import Bootstrap, Episodes

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
