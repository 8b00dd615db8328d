"""Clients that a policy's worker uses to call the envs that it acts for: in its own process, or through its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from attrs import define, field, frozen

from vla_rl.runtime.comm.peers import RayPeers
from vla_rl.runtime.comm.shared_memory import SharedMemoryReader
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.scheduling.batching import Call, Lane


@frozen(eq=False)
class _Remote:
    """Reference to the answer of an env in another process."""

    lane: int
    reference: Any


@define(eq=False)
class EnvClients:
    """Clients of the lanes that a worker's policy acts for."""

    assignment: Assignment
    direct: Callable[[str], Call]
    """Returns a function that calls a role of this worker."""
    idle: Callable[[], None]
    """Tells that the worker waits, so that the waiting is not taken for a hung call."""
    peers: RayPeers | None = field(default=None, init=False)
    _readers: dict[int, SharedMemoryReader] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._readers = {lane.index: SharedMemoryReader() for lane in self.assignment.served}

    def connect_peers(self, peers: RayPeers) -> None:
        """Connect to the workers of the other simulators, in place of earlier connections."""
        if self.peers is not None:
            self.peers.close()
        self.peers = peers
        of_worker: dict[int, list[int]] = {}
        for lane, sim_worker in zip(self.assignment.served, self.assignment.homes, strict=True):
            of_worker.setdefault(sim_worker, []).append(lane.index)
        peers.open_channels(of_worker)

    def through_channels(self) -> AbstractContextManager[None]:
        return nullcontext() if self.peers is None else self.peers.through_channels()

    def lanes_of(self, role: str) -> list[Lane]:
        """Return the lanes that this worker acts for, with calls to their simulators ("sim") or to the envs of an added
        role.
        """
        served, homes, added_at = self.assignment.served, self.assignment.homes, self.assignment.added_envs_at
        at = homes if role == "sim" or added_at is None else (added_at,) * len(served)
        return [
            Lane(slice=lane, sim=self._call_of(role, lane.index, sim_worker))
            for lane, sim_worker in zip(served, at, strict=True)
        ]

    def _call_of(self, role: str, lane: int, sim_worker: int) -> Call:
        if sim_worker == self.assignment.index:
            reader = self._readers[lane]
            direct = self.direct(role)
            return lambda method, *arguments: reader.open_message(direct(method, *arguments))
        peers = self.peers
        assert peers is not None  # the driver connects them before the first rollout
        return lambda method, *arguments: _Remote(lane, peers.call(sim_worker, role, method, *arguments))

    def value_of(self, reference: Any) -> Any:
        """Wait for an answer and return it, copied out of shared memory."""
        if not isinstance(reference, _Remote):
            return reference
        assert self.peers is not None
        self.idle()
        return self._readers[reference.lane].open_message(self.peers.value_of(reference.reference))

    def wait_for_any(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the answers that are there: at least one, unless the timeout (seconds) came first."""
        local = [reference for reference in references if not isinstance(reference, _Remote)]
        remote = {remote.reference: remote for remote in references if isinstance(remote, _Remote)}
        if not remote:
            return local
        assert self.peers is not None
        self.idle()
        answered = self.peers.wait_for_any(list(remote), 0.0 if local else timeout)
        return [*local, *(remote[reference] for reference in answered)]
