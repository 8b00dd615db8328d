"""What a worker reports of its rollout: finished tickets, what was done, and how far it is."""

from __future__ import annotations

from typing import Any

from attrs import define, field, frozen

from vla_rl.runtime.messages.requests import EnvTrajectory
from vla_rl.toolkit.waiting import Work


@frozen(kw_only=True, eq=False)
class TrajectoryResult:
    """A ticket that was played."""

    finished: EnvTrajectory
    """What its simulator says."""
    chosen: dict[str, Any]
    """What its policy says: light fields [T, ...]; nothing in an evaluation."""


@define(kw_only=True, eq=False)
class RolloutReport:
    """What came of some tickets, and what was done since the last report."""

    played: list[TrajectoryResult] = field(factory=list)
    env_seconds: dict[int, float] = field(factory=dict)
    """Of each sim worker, or of each lane where lanes work at the same time."""
    policy_seconds: dict[int, float] = field(factory=dict)
    """Of each policy's worker."""
    env_steps: int = 0
    replayed: int = 0
    restarted: int = 0
    """As in `Request`."""
    faults: list[str] = field(factory=list)
    """What broke and was repaired."""

    def add(self, other: RolloutReport) -> None:
        """What another says was done too, but for its tickets."""
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
    """Of one policy's worker, or the sum of several, since it began to play."""

    tickets: int = 0
    """That were played to their end."""
    steps: int = 0
    """Chunk steps of those that are being played."""
    solved: int = 0
    """Demonstrations, by the scripted expert."""
    works: tuple[Work, ...] = ()
    """What else goes on there, and takes long."""

    def __add__(self, other: RolloutProgress) -> RolloutProgress:
        return RolloutProgress(
            self.tickets + other.tickets,
            self.steps + other.steps,
            self.solved + other.solved,
            self.works + other.works,
        )
