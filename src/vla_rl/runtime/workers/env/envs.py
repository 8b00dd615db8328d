"""What a role does that has lanes of rows: they play tickets for a purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

from attrs import evolve

from vla_rl.core.types import Array
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest, too_many_faults
from vla_rl.runtime.workers.env.episodes import Episodes


class EnvLanes:
    def __init__(self, name: str, max_faults: int) -> None:
        """
        Args:
            name: of the simulator, for errors.
            max_faults: how often rows may break.
        """
        self.name, self.max_faults = name, max_faults
        self.played: dict[str, Mapping[int, Episodes]] = {}
        """Purpose of a `Mode` -> lane -> its episodes."""
        self.running: dict[int, Episodes] = {}
        """Of each lane, those that it plays."""
        self.faults: list[str] = []
        """That no request has told of yet."""
        self.fault_count = 0
        self._counting = Lock()

    def started(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Play these tickets, and forget what the lane has played before."""
        self.running[lane] = self.played[purpose][lane]
        self.running[lane].clear()
        return self.stepped(lane, None, tickets)

    def stepped(self, lane: int, actions: Array | None, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Execute a chunk in each row that plays, and begin with further tickets."""
        request = self.running[lane].step(actions, tickets)
        with self._counting:
            faults, self.faults = self.faults, []
        return evolve(request, faults=tuple(faults)) if faults else request

    def on_fault(self, text: str) -> None:
        """A row broke. Raises EnvError when there were too many."""
        with self._counting:
            self.fault_count += 1
            self.faults.append(text)
            count = self.fault_count
        if count > self.max_faults:
            raise too_many_faults(count, self.max_faults, self.name, text)


def in_host_memory(request: StepRequest) -> StepRequest:
    """With observations as NumPy arrays."""
    obs = None if request.obs is None else request.obs.numpy()
    final = None if request.final is None else request.final.numpy()
    return evolve(request, obs=obs, final=final)
