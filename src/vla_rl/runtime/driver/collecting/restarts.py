"""Restarts of dead sim workers, whose tickets are rolled out again.

Randomness is keyed by ticket, episode and chunk, so a repeated rollout gives the same numbers: a dead worker costs time
only. Policies and learners hold state that cannot be rebuilt, so a run that loses one of them resumes from its last
checkpoint (`core/run/session.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attrs import define

from vla_rl.core.errors import WorkerDied
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.runtime.driver.reports.faults import FaultLog

T = TypeVar("T")


@define(eq=False, slots=False)
class Restarts:
    """Counts and performs the restarts of sim workers."""

    fleet: Fleet
    limit: int
    """`runtime.restarts`."""
    fault_log: FaultLog
    """Log of each restart, which does not count towards its limit."""
    stateful: bool = False
    """Sim workers have further roles, whose state cannot be rebuilt either."""
    count: int = 0

    def run_with_restarts(self, roll_out: Callable[[], T]) -> T:
        """Call `roll_out` until it ends without the death of a sim worker. Raises WorkerDied when another worker dies,
        or too many do."""
        while True:
            try:
                return roll_out()
            except WorkerDied as exc:
                self.fleet.connect_policies(self.restart_dead_workers(exc))

    def restart_dead_workers(self, error: WorkerDied) -> set[int]:
        """Start the dead workers again. Return them; their policies are not connected to them yet. A death during this
        is another one.

        Raises the error where other workers than sim workers died, or too many.
        """
        fleet = self.fleet
        dead = [fleet.workers[index] for index in fleet.backend.dead_workers()]
        if not dead or self.stateful or any(worker.assignment.slot.roles != ("sim",) for worker in dead):
            raise error
        if self.count >= self.limit:
            error.add_note(f"sim workers were started again {self.count} times (runtime.restarts: {self.limit})")
            raise error
        self.count += 1
        workers = ", ".join(str(worker.worker_index) for worker in dead)
        num_lost = sum(lane.num_envs for worker in dead for lane in worker.assignment.lanes)
        self.fault_log.on_fault(
            f"sim worker {workers} died with {num_lost} unfinished episodes and is started again; they are re-run: "
            f"{str(error).splitlines()[0]}"
        )
        restarted = {worker.worker_index for worker in dead}
        fleet.backend.revive_workers(sorted(restarted))
        try:
            fleet.get_all([worker.call(HostInterface.start_sim) for worker in dead])
        except WorkerDied as exc:
            restarted |= self.restart_dead_workers(exc)
        return restarted
