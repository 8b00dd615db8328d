"""What placement strategies are asked (a cluster and a job) and answer (a plan of slots)."""

from __future__ import annotations

from attrs import field, frozen


@frozen(kw_only=True)
class Cluster:
    """What there is to place on."""

    cpus: float
    gpus: int
    memory: int
    """Host memory in bytes."""


@frozen(kw_only=True)
class Job:
    """What has to be placed."""

    num_envs: int
    group_size: int
    env: str
    """Type of the simulator, for messages."""
    row_memory: int = 0
    """Host memory of one simulator row in bytes; 0 when negligible."""


@frozen(kw_only=True)
class Slot:
    """One worker (a Ray actor, or a set of roles in the local process)."""

    roles: tuple[str, ...]
    """Of "sim", "policy", "learner"; roles in one slot call each other directly and share one model."""
    device: str = "cpu"
    cpus: float = 1.0
    gpus: float = 0.0


@frozen(kw_only=True)
class Window:
    """When a policy worker infers: as soon as `max_batch` rows wait, or the oldest has waited `max_wait` seconds.
    `max_wait=None` waits for the batch, `max_batch=None` is all rows (or, with stages, one lane)."""

    max_batch: int | None = None
    max_wait: float | None = None


@frozen(kw_only=True)
class Plan:
    slots: tuple[Slot, ...]
    stages: int = 1
    """Lanes of each sim worker."""
    window: Window = field(factory=Window)
    max_lag: int = 0
    offload: frozenset[str] = frozenset()

    def hosting(self, role: str) -> tuple[int, ...]:
        """Indices of the slots that host a role."""
        return tuple(i for i, slot in enumerate(self.slots) if role in slot.roles)


class DoesNotFit(Exception):
    """A placement strategy cannot place the job; the message carries what is needed and what is there."""
