"""What placement strategies are asked (a cluster and a job) and answer (a plan of slots)."""

from __future__ import annotations

from collections.abc import Mapping

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
class Measured:
    """What the roles of a job took, for `rows` rows on one device."""

    rows: int
    sim: float
    """Seconds of a chunk step."""
    policy: float
    """Seconds of an inference."""
    learner: float
    """Seconds of training on the samples of one chunk step, all epochs."""
    chunk_steps: int
    """Of an episode, at most."""


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
    measured: Measured | None = None
    """None: not measured; a strategy that wants it raises MeasureFirst, and is asked again."""


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
    `max_wait=None` waits for the batch, `max_batch=None` is all rows (or, with stages, one lane). `max_wait` needs
    policies that act for several lanes of other workers; elsewhere it is refused."""

    max_batch: int | None = None
    max_wait: float | None = None


@frozen(kw_only=True)
class Plan:
    slots: tuple[Slot, ...]
    stages: int = 1
    """Lanes of each sim worker."""
    window: Window = field(factory=Window)
    max_lag: int = 0
    """Published versions that a chunk may be old; only 0, the newest weights, is carried out so far."""
    offload: frozenset[str] = frozenset()
    """Roles that leave their device while they have nothing to do."""

    def hosting(self, role: str) -> tuple[int, ...]:
        """Indices of the slots that host a role."""
        return tuple(i for i, slot in enumerate(self.slots) if role in slot.roles)


class DoesNotFit(Exception):
    """A placement strategy cannot place the job; the message carries what is needed and what is there."""


class MeasureFirst(DoesNotFit):
    """A placement strategy plans by `Job.measured`."""


def checked(plan: Plan, cluster: Cluster, job: Job) -> Plan:
    """The plan, if its rows, lanes and ranks add up. Raises DoesNotFit with what is needed and what is there."""
    sims, policies, learners = (plan.hosting(role) for role in ("sim", "policy", "learner"))
    for role, slots in (("sim", sims), ("policy", policies), ("learner", learners)):
        if not slots:
            raise DoesNotFit(f"the placement has no slot for the {role} role")
    check_lanes(job, len(sims), plan.stages)
    check_acts(plan)
    if job.global_batch is not None and job.global_batch % len(learners):
        raise DoesNotFit(
            f"an optimiser step of {job.global_batch} samples (train.global_batch) cannot be shared evenly by "
            f"{len(learners)} learners; set train.global_batch to a multiple of {len(learners)}, or choose a number of "
            f"learners that divides {job.global_batch}"
        )
    apart = sum("policy" in slot.roles and "learner" not in slot.roles for slot in plan.slots)
    if "policy" in plan.offload and not apart:
        raise DoesNotFit(
            "offload.policy has nothing to free: every policy shares its weights with the learner in its worker; leave "
            "it out, or give policy and learner devices of their own (disaggregated)"
        )
    _check_shares(plan, cluster)
    _check_memory(plan, cluster, job, len(sims))
    return plan


def check_acts(plan: Plan) -> None:
    """Raise DoesNotFit for what a plan asks for and the runtime does not do."""
    if plan.max_lag:
        raise DoesNotFit(
            f"the placement plans max_lag {plan.max_lag}, and every rollout is played with the newest weights so far; "
            f"plan max_lag=0 (rollout.lag simulates old weights)"
        )
    sims, policies = plan.hosting("sim"), plan.hosting("policy")
    together = set(sims) <= set(policies)
    if plan.window.max_wait is not None and (together or len(sims) * plan.stages <= len(policies)):
        why = "simulates its own rows" if together else "acts for one lane"
        raise DoesNotFit(
            f"the placement plans a window with max_wait {plan.window.max_wait:g} s, and there is nothing to wait for: "
            f"every policy worker {why}; leave max_wait out, or give a policy several lanes of other sim workers"
        )


def check_lanes(job: Job, workers: int, stages: int) -> None:
    """Raise DoesNotFit for rows that the lanes of so many sim workers cannot share evenly."""
    lanes = workers * stages
    if job.num_envs % lanes:
        what, made = ("workers", "") if stages == 1 else ("lanes", f" ({workers} sim workers x {stages})")
        raise DoesNotFit(
            f"{job.num_envs} rows cannot be shared evenly by {lanes} {what}{made}; set env.num_envs to a multiple of "
            f"{lanes}, or choose a number of {what} that divides {job.num_envs}"
        )


def _check_shares(plan: Plan, cluster: Cluster) -> None:
    """Workers ask for no more than the cluster, or their node, has."""
    nodes = {node.name: node for node in cluster.nodes}
    lost = sorted({slot.node for slot in plan.slots if slot.node is not None} - nodes.keys())
    if lost:
        raise DoesNotFit(f"no node is named {lost[0]!r}; there are: {', '.join(nodes)}")
    everywhere: list[tuple[str | None, Cluster | Node]] = [(None, cluster), *nodes.items()]
    for name, there in everywhere:
        slots = [slot for slot in plan.slots if name in (None, slot.node)]
        for what, needed, have in (
            ("CPUs", sum(slot.cpus for slot in slots), there.cpus),
            ("GPUs", sum(slot.gpus for slot in slots), there.gpus),
        ):
            if needed > have + 1e-6:
                where = "" if name is None else f" on node {name!r}"
                raise DoesNotFit(f"{len(slots)} workers need {needed:g} {what}{where}, and there are {have:g}")
    most = max((node.cpus for node in cluster.nodes), default=0.0)
    for slot in plan.slots:
        if slot.cpus > most + 1e-6:
            raise DoesNotFit(f"a worker needs {slot.cpus:g} CPUs on one node, and the largest has {most:g}")


def _check_memory(plan: Plan, cluster: Cluster, job: Job, workers: int) -> None:
    """Simulators fit into the host memory of their nodes."""
    there: Mapping[str | None, int] = {None: cluster.memory, **{node.name: node.memory for node in cluster.nodes}}
    for name, memory in there.items():
        here = sum("sim" in slot.roles and slot.node == name for slot in plan.slots)
        rows = job.num_envs * here // workers
        needed = rows * job.row_memory
        if needed > memory:
            raise DoesNotFit(
                f"{rows} rows of {job.env} need about {needed / 2**30:.1f} GiB of memory "
                f"({job.row_memory / 2**30:.1f} GiB each), and there are {memory / 2**30:.1f} GiB"
                f"{'' if name is None else f' on node {name!r}'}; "
                f"at most {memory // job.row_memory} rows fit: lower env.num_envs"
            )
