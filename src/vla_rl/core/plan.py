"""Input of placement strategies (a cluster and a job) and their output (a plan of slots)."""

from __future__ import annotations

from collections.abc import Callable

from attrs import Factory, field, frozen


@frozen(kw_only=True)
class Node:
    """One machine of a cluster."""

    name: str
    """Name as Ray lists it (`ray start --node-name`, or the machine's address)."""
    cpus: float
    gpus: int
    memory: int
    """Host memory in bytes."""


@frozen(kw_only=True)
class Cluster:
    """Resources that are available for a run."""

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
    """Machines of the cluster, whose resources the fields above sum up; default: one machine."""
    gpu_memory: int | None = None
    """Memory of each GPU in bytes, of the smallest one; None: unknown."""


@frozen(kw_only=True)
class Job:
    """The run that has to be placed."""

    num_envs: int
    group_size: int
    env: str
    """Type of the simulator, for messages."""
    env_memory: int = 0
    """Host memory of one env (simulator instance) in bytes; 0 when negligible."""
    global_batch: int | None = None
    """Samples of an optimiser step, over all learners; None: the whole rollout."""
    forecast: Callable[[Plan], float] | None = field(default=None, eq=False)
    """Function that returns the seconds an iteration will take under a plan, simulated from measured times, as in
    `vla-rl plan`. None: not measured yet; a strategy that needs it raises MeasureFirst."""


@frozen(kw_only=True)
class Slot:
    """One worker (a Ray actor, or a set of roles in the local process)."""

    roles: tuple[str, ...]
    """Roles of the worker, out of "sim", "policy", "learner". They call each other directly and share one model."""
    device: str = "cpu"
    cpus: float = 1.0
    gpus: float = 0.0
    """Share of a GPU that this worker has, 1 for a whole one."""
    node: str | None = None
    """Name of the worker's node; None: any."""
    index: int | None = None
    """Number of the worker's device on that node. Slots with the same number share the device; None: any device."""


@frozen(kw_only=True)
class Batching:
    """Dynamic batching of a policy worker: it infers once `max_batch` envs wait, or one has for `max_wait_s` seconds.
    `max_wait_s=None` waits for the batch; `max_batch=None` means all envs (with pipeline stages: one lane).
    `max_wait_s` needs policies that act for several lanes of other workers; otherwise it is refused."""

    max_batch: int | None = None
    max_wait_s: float | None = None


@frozen(kw_only=True)
class Plan:
    """Workers of a run, their lanes, dynamic batching and offload: the answer of a placement strategy."""

    slots: tuple[Slot, ...]
    stages: int = 1
    """Lanes (pipeline stages) of each sim worker."""
    concurrent_lanes: bool = False
    """Lanes of a sim worker step and reset concurrently, each in a thread; False: one after another."""
    batching: Batching = field(factory=Batching)
    offload: frozenset[str] = frozenset()
    """Roles that free their device's memory while they are idle."""

    def hosting(self, role: str) -> tuple[int, ...]:
        """Return the indices of the slots that host a role."""
        return tuple(i for i, slot in enumerate(self.slots) if role in slot.roles)


class DoesNotFit(Exception):
    """A placement strategy cannot place the job. The message compares what is needed with what is available."""


class MeasureFirst(DoesNotFit):
    """A placement strategy needs `Job.forecast` to plan."""
