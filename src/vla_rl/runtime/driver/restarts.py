"""Sim workers that die are started again, and what they played is played again.

Randomness is keyed by ticket, episode and chunk, so what is played again gives the numbers it would have given: a dead
worker costs time. Policies and learners hold what cannot be made again, so a run that loses one of them goes on from
its last checkpoint (`core/run/session.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vla_rl.core.errors import WorkerDied
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface

T = TypeVar("T")


class Restarts:
    def __init__(self, fleet: Fleet, limit: int, on_fault: Callable[[str], None], world_model: bool = False):
        """`limit`: `runtime.restarts`; `on_fault` is told of each; `world_model`: it is with the simulators, so that
        their workers cannot be made again either."""
        self.world_model = world_model
        self.fleet, self.limit, self.on_fault, self.count = fleet, limit, on_fault, 0

    def surviving(self, play: Callable[[], T]) -> T:
        """Play until no sim worker dies meanwhile. Raises WorkerDied when another one does, or too many."""
        while True:
            try:
                return play()
            except WorkerDied as exc:
                self.fleet.introduce(self.revive(exc))

    def revive(self, error: WorkerDied) -> set[int]:
        """Start the workers that died again; their policies do not know them yet. -> these workers. Raises the error
        where other than sim workers died, or too many."""
        fleet = self.fleet
        dead = [fleet.workers[index] for index in fleet.backend.dead()]
        if not dead or self.world_model or any(worker.assignment.slot.roles != ("sim",) for worker in dead):
            raise error
        if self.count >= self.limit:
            error.add_note(f"sim workers were started again {self.count} times (runtime.restarts: {self.limit})")
            raise error
        self.count += 1
        fleet.backend.revive([worker.worker for worker in dead])
        fleet.get_all([worker.call(HostInterface.start_sim) for worker in dead])
        workers = ", ".join(str(worker.worker) for worker in dead)
        lost = sum(lane.rows for worker in dead for lane in worker.assignment.lanes)
        self.on_fault(
            f"sim worker {workers} died with {lost} unfinished episodes and was started again; they are played again: "
            f"{str(error).splitlines()[0]}"
        )
        return {worker.worker for worker in dead}
