"""What placement strategies are asked (a cluster and a job) and answer (a plan of slots)."""

from __future__ import annotations

from collections.abc import Callable

from attrs import Factory, field, frozen


@frozen(kw_only=True)
class Node:
    """One machine of a cluster."""

    name: str
    """As Ray lists it (`ray start --node-name`, or its address)."""
    cpus: float
    gpus: int
    memory: int
    """Host memory in bytes."""


@frozen(kw_only=True)
class Cluster:
    """What there is to place on."""

    cpus: float
    gpus: int
    memory: int
    """Host memory in bytes."""
    nodes: tuple[Node, ...] = field(
        default=Factory(
            lambda self: (Node(name="this machine", cpus=self.cpus, gpus=self.gpus, memory=self.memory),),
            takes_self=True,
        )
    )
    """Its machines, of which these are the sums; by default one."""


@frozen(kw_only=True)
class Job:
    """What has to be placed."""

    num_envs: int
    group_size: int
    env: str
    """Type of the simulator, for messages."""
    row_memory: int = 0
    """Host memory of one simulator row in bytes; 0 when negligible."""
    global_batch: int | None = None
    """Samples of an optimiser step, over all learners; None: the whole rollout."""
    forecast: Callable[[Plan], float] | None = field(default=None, eq=False)
    """Seconds that an iteration will take under a plan, simulated with what the roles took in a measurement, as `vla-rl
    plan` does it. None: not measured yet; a strategy that wants it raises MeasureFirst, and is asked again."""


@frozen(kw_only=True)
class Slot:
    """One worker (a Ray actor, or a set of roles in the local process)."""

    roles: tuple[str, ...]
    """Of "sim", "policy", "learner"; roles in one slot call each other directly and share one model."""
    device: str = "cpu"
    cpus: float = 1.0
    gpus: float = 0.0
    """1, or the part of a GPU that this worker has."""
    node: str | None = None
    """Name of its node; None: any."""
    index: int | None = None
    """Number of its device on that node. Slots with the same one share it; None: any device."""


@frozen(kw_only=True)
class Window:
    """When a policy worker infers: as soon as `max_batch` rows wait, or the oldest has waited `max_wait` seconds.
    `max_wait=None` waits for the batch, `max_batch=None` is all rows (or, with stages in lock-step, one lane).
    `max_wait` needs policies that act for several lanes of other workers; elsewhere it is refused."""

    max_batch: int | None = None
    max_wait: float | None = None


@frozen(kw_only=True)
class Plan:
    slots: tuple[Slot, ...]
    stages: int = 1
    """Lanes of each sim worker."""
    side_by_side: bool = False
    """Lanes of a sim worker step and reset at the same time, each in a thread; else one after another."""
    window: Window = field(factory=Window)
    offload: frozenset[str] = frozenset()
    """Roles that leave their device while they have nothing to do."""

    def hosting(self, role: str) -> tuple[int, ...]:
        """Indices of the slots that host a role."""
        return tuple(i for i, slot in enumerate(self.slots) if role in slot.roles)


class DoesNotFit(Exception):
    """A placement strategy cannot place the job; the message carries what is needed and what is there."""


class MeasureFirst(DoesNotFit):
    """A placement strategy plans by `Job.forecast`."""
