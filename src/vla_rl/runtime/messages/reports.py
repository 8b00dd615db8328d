"""Reports of a worker on its rollout: finished tickets, the work since the last report, and the progress so far."""

from __future__ import annotations

from typing import Any

from attrs import define, field, frozen

from vla_rl.runtime.messages.requests import EnvTrajectory
from vla_rl.toolkit.waiting import Work


@frozen(kw_only=True, eq=False)
class TrajectoryResult:
    """A finished ticket: the simulator's half and the policy's half of its trajectory."""

    env_part: EnvTrajectory
    """The simulator's half."""
    policy_part: dict[str, Any]
    """The policy's half: the policy's fields of the record, [T, ...]; empty in an evaluation."""


@define(kw_only=True, eq=False)
class RolloutReport:
    """Finished tickets, and the work done since the last report."""

    collected: list[TrajectoryResult] = field(factory=list)
    env_seconds: dict[int, float] = field(factory=dict)
    """Seconds of each sim worker (by its index), or of each lane where lanes run concurrently."""
    policy_seconds: dict[int, float] = field(factory=dict)
    """Seconds of each policy worker, by its index."""
    env_steps: int = 0
    replayed: int = 0
    restarted: int = 0
    """Streams that were restarted; `replayed` and `restarted` count as in `StepRequest`."""
    faults: list[str] = field(factory=list)
    """Descriptions of faults that were repaired."""

    def add_work(self, other: RolloutReport) -> None:
        """Add the work of another report, but not its tickets."""
        for worker, seconds in other.env_seconds.items():
            self.env_seconds[worker] = self.env_seconds.get(worker, 0.0) + seconds
        for worker, seconds in other.policy_seconds.items():
            self.policy_seconds[worker] = self.policy_seconds.get(worker, 0.0) + seconds
        self.env_steps += other.env_steps
        self.replayed += other.replayed
        self.restarted += other.restarted
        self.faults += other.faults


@frozen
class RolloutProgress:
    """Progress of one policy worker, or the sum of several, since its rollout or evaluation began."""

    tickets: int = 0
    """Number of finished tickets."""
    steps: int = 0
    """Chunk steps of the tickets that are running."""
    solved: int = 0
    """Number of demonstrations in which the scripted expert succeeded."""
    works: tuple[Work, ...] = ()
    """Other long-running work of that process (starting envs, loading the model)."""

    def __add__(self, other: RolloutProgress) -> RolloutProgress:
        return RolloutProgress(
            self.tickets + other.tickets,
            self.steps + other.steps,
            self.solved + other.solved,
            self.works + other.works,
        )
