"""Base of the roles that have lanes of envs: they roll out tickets for a purpose, and count faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

from attrs import evolve

from vla_rl.core.types import Array
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest, too_many_faults
from vla_rl.runtime.workers.env.episodes import Episodes


class EnvLanes:
    """Lanes of real or imagined envs, with the episodes of each purpose."""

    def __init__(self, name: str, max_faults: int) -> None:
        """Create lanes without episodes.

        Args:
            name: name of the simulator, for errors.
            max_faults: number of faults that the run tolerates.
        """
        self.name = name
        self.max_faults = max_faults
        self.episodes_of: dict[str, Mapping[int, Episodes]] = {}
        """Purpose of a `PolicyMode` -> lane -> its episodes."""
        self.running: dict[int, Episodes] = {}
        """Lane -> the episodes that it is running."""
        self.faults: list[str] = []
        """Faults that no request has reported yet."""
        self.fault_count = 0
        self._counting = Lock()

    def begin_lane(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Start these tickets, and forget what the lane ran before."""
        self.running[lane] = self.episodes_of[purpose][lane]
        self.running[lane].clear_tickets()
        return self.step_lane(lane, None, tickets)

    def step_lane(self, lane: int, actions: Array | None, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Execute a chunk in each env that has a ticket, and start further tickets."""
        request = self.running[lane].step(actions, tickets)
        with self._counting:
            faults = self.faults
            self.faults = []
        return evolve(request, faults=tuple(faults)) if faults else request

    def on_fault(self, text: str) -> None:
        """Count a fault of an env. Raises StopAndSave when there were too many."""
        with self._counting:
            self.fault_count += 1
            self.faults.append(text)
            count = self.fault_count
        if count > self.max_faults:
            raise too_many_faults(count, self.max_faults, self.name, text)


def in_host_memory(request: StepRequest) -> StepRequest:
    """Return the request with observations as NumPy arrays."""
    obs = None if request.obs is None else request.obs.numpy()
    final = None if request.final is None else request.final.numpy()
    return evolve(request, obs=obs, final=final)
