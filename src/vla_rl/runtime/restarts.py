"""Sim workers that die are started again, and what was being played is played again.

Randomness is keyed by row, episode and chunk, so a rollout or an evaluation that is played again gives the numbers it
would have given: a dead worker costs time. Simulators keep nothing between rollouts; policies and learners do, so a run
that loses one of them goes on from its last checkpoint (`core/session.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vla_rl.runtime.backends.backend import WorkerDied

if TYPE_CHECKING:
    from vla_rl.runtime.driver import Runtime

T = TypeVar("T")


class Restarts:
    def __init__(self, runtime: Runtime):
        self.runtime, self.count = runtime, 0

    def surviving(self, play: Callable[[], T]) -> T:
        """Play until no sim worker dies meanwhile. Raises WorkerDied when another one does, or too many."""
        while True:
            try:
                return play()
            except WorkerDied as exc:
                self._revive(exc)

    def _revive(self, error: WorkerDied) -> None:
        runtime = self.runtime
        dead = runtime.backend.dead()
        limit = runtime.spec.runtime.restarts
        if not dead or any(runtime.assignments[worker].slot.roles != ("sim",) for worker in dead):
            raise error
        if self.count >= limit:
            error.add_note(f"sim workers were started again {self.count} times (runtime.restarts: {limit})")
            raise error
        self.count += 1
        runtime.backend.revive(dead)
        runtime.backend.get_all([runtime.call(worker, "worker", "start_sim") for worker in dead])
        runtime.introduce()
        runtime.backend.get_all([runtime.call(place.index, "policy", "clear_shelf") for place in runtime.policies])
        workers = ", ".join(str(worker) for worker in dead)
        lost = sum(lane.rows for worker in dead for lane in runtime.assignments[worker].lanes)
        runtime.on_fault(
            f"sim worker {workers} died with {lost} unfinished episodes and was started again; all rows play again: "
            f"{str(error).splitlines()[0]}"
        )
