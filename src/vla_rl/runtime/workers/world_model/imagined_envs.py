"""The envs in which policies train in imagination, in the worker of the world model. They are separate from the
simulators' envs, so that a rollout may run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.runtime.comm.interfaces import ImaginedEnvInterface
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest
from vla_rl.runtime.workers.env.envs import EnvLanes, in_host_memory
from vla_rl.runtime.workers.world_model.worker import WorldModelWorker


class ImaginedEnvs(EnvLanes, ImaginedEnvInterface):
    """The imagined envs of all lanes (role `IMAGINED`)."""

    def __init__(self, practice: WorldModelWorker, rows: Mapping[int, int], bootstrap: bool) -> None:
        """Create the envs.

        Args:
            rows: lane -> number of its envs, for all lanes of the run.
            bootstrap: bootstrap values are computed after truncations.
        """
        spec = practice.spec
        super().__init__(spec.env.type, spec.runtime.max_faults)
        self.practice = practice
        self.played |= practice.episodes(rows, bootstrap, self.on_fault)

    def begin(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        self._check(tickets)
        return in_host_memory(self.started(lane, purpose, tickets))

    def step(self, lane: int, actions: Any, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        self._check(tickets)
        return in_host_memory(self.stepped(lane, actions, tickets))

    def _check(self, tickets: Sequence[EpisodeRequest]) -> None:
        """Raises RuntimeError for a ticket that belongs to another version of the world model than the current one."""
        here = self.practice.counts.updates
        for ticket in tickets:
            if ticket.world != here:
                raise RuntimeError(f"ticket {ticket.number} is of world model version {ticket.world}, not {here}")
