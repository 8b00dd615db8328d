"""Recovery from faults of envs: an env that broke runs its episode again, from a reset."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_rl.core.types import Array, ResetState
from vla_rl.runtime.workers.env.auto_reset import StreamPositions
from vla_rl.runtime.workers.env.episode_records import RunningTrajectories
from vla_rl.runtime.workers.env.simulator import LaneSimulator


class FaultRecovery:
    """Reports the faults of a lane's envs, and drops what their failed attempts recorded."""

    def __init__(
        self,
        simulator: LaneSimulator,
        streams: StreamPositions,
        trajectories: RunningTrajectories,
        state_of: Callable[[int], ResetState],
        on_fault: Callable[[str, ResetState | None], None],
    ) -> None:
        """Create the recovery of a lane.

        Args:
            state_of: env -> reset state of its running episode.
            on_fault: called with the text of each fault, and the reset state of the episode that it ended, if any; it
                may raise to stop.
        """
        self.simulator = simulator
        self.streams = streams
        self.trajectories = trajectories
        self.state_of = state_of
        self.on_fault = on_fault

    def find_broken(self, active: Array) -> Array:
        """Report new faults. Return those of the active envs that broke since the last call, int64, ascending."""
        faults = self.simulator.take_faults()
        for env_id, texts in faults.items():
            self.streams.forget_observation(env_id)
            for text in texts:
                self.on_fault(text, self.state_of(env_id) if active[env_id] else None)
        return np.array(sorted(env_id for env_id in faults if active[env_id]), np.int64)

    def drop_attempt(self, env_id: int, ticket: int) -> tuple[int, int]:
        """Drop the ticket's chunk steps of the running episode. Return (ticket, number of its chunk steps that remain
        valid).
        """
        return ticket, self.trajectories.drop_attempt(env_id)
