"""Checks that a plan is consistent and fits the machines."""

from __future__ import annotations

from collections.abc import Mapping

from vla_rl.core.errors import format_count, there_are
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Node, Plan

ROLES = ("sim", "policy", "learner")
DEVICES = ("cpu", "cuda", "cuda:0")
"""Names of a worker's device. A worker sees only its own GPU, which is its first."""


def validate_plan(plan: Plan, cluster: Cluster, job: Job) -> Plan:
    """Return the plan if its envs, lanes and ranks are consistent. Raise DoesNotFit with need and supply."""
    sims, learners = plan.hosting("sim"), plan.hosting("learner")
    for role in ROLES:
        if not plan.hosting(role):
            raise DoesNotFit(f"the placement has no slot for the {role} role")
    check_lanes(job, len(sims), plan.stages)
    check_acts(plan)
    envs, batch = job.num_envs // (len(sims) * plan.stages), plan.batching.max_batch
    if batch is not None and batch < envs:
        raise DoesNotFit(
            f"inferences of at most {batch} envs (placement.batching.max_batch) would split lanes of {envs} envs, "
            f"which step together; set it to {envs} or more, or give lanes fewer envs (placement.lanes, sim_workers)"
        )
    if job.global_batch is not None and job.global_batch % len(learners):
        raise DoesNotFit(
            f"an optimiser step of {job.global_batch} samples (train.global_batch) cannot be shared evenly by "
            f"{len(learners)} learners; set train.global_batch to a multiple of {len(learners)}, or choose a number of "
            f"learners that divides {job.global_batch}"
        )
    acting_only = sum("policy" in slot.roles and "learner" not in slot.roles for slot in plan.slots)
    if "policy" in plan.offload and not acting_only:
        raise DoesNotFit(
            "offload.policy has nothing to free: every policy shares its weights with the learner in its worker; leave "
            "it out, or give policy and learner separate devices (disaggregated)"
        )
    _check_shares(plan, cluster)
    check_slots(plan, cluster)
    _check_memory(plan, cluster, job, len(sims))
    return plan


def check_slots(plan: Plan, cluster: Cluster) -> None:
    """Raise DoesNotFit for roles or devices that do not exist, or that are assigned twice."""
    gpus_of = {node.name: node.gpus for node in cluster.nodes}
    most_gpus = max(gpus_of.values(), default=0)
    shares: dict[tuple[str | None, int], float] = {}
    for number, slot in enumerate(plan.slots):
        slot_name = f"slot {number} ({', '.join(slot.roles)})"
        unknown = [role for role in slot.roles if role not in ROLES]
        if unknown or not slot.roles:
            raise DoesNotFit(f"{slot_name} has the roles {slot.roles!r}; give some of {', '.join(ROLES)}, as a tuple")
        if len(set(slot.roles)) < len(slot.roles):
            raise DoesNotFit(f"{slot_name} names a role twice; a worker has each role once")
        if slot.device not in DEVICES:
            raise DoesNotFit(
                f"{slot_name} is on device {slot.device!r}; write cpu or cuda (a worker sees its own GPU only), and "
                f"`index` for the number of that GPU on its node"
            )
        if not 0 <= slot.gpus <= 1 or slot.cpus < 0:
            request = f"{format_count(slot.gpus, 'GPU')} and {format_count(slot.cpus, 'CPU')}"
            raise DoesNotFit(f"{slot_name} asks for {request}; a worker has 0 to 1 GPU")
        if (slot.device == "cpu") != (slot.gpus == 0):
            raise DoesNotFit(
                f"{slot_name} is on {slot.device} with {format_count(slot.gpus, 'GPU')}; set `device` and `gpus` "
                f"together"
            )
        if slot.index is None:
            continue
        num_gpus = most_gpus if slot.node is None else gpus_of.get(slot.node, 0)
        if slot.index < 0 or (slot.gpus and slot.node in (None, *gpus_of) and slot.index >= num_gpus):
            where = "" if slot.node is None else f" on node {slot.node!r}"
            numbers = f", 0 to {num_gpus - 1}" if num_gpus else ""
            raise DoesNotFit(f"{slot_name} is on GPU {slot.index}, and {there_are(num_gpus)}{where}{numbers}")
        shares[slot.node, slot.index] = shares.get((slot.node, slot.index), 0.0) + slot.gpus
    for (_, index), share in shares.items():
        if share > 1 + 1e-6:
            raise DoesNotFit(f"workers share GPU {index} and ask for {share:g} of it; their `gpus` add up to 1 at most")
    large = sum(slot.gpus > 0.5 for slot in plan.slots)
    if large > cluster.gpus:
        raise DoesNotFit(f"{large} workers need more than half a GPU each, and {there_are(cluster.gpus, 'GPU')}")


def idle_policies(plan: Plan) -> list[int]:
    """Return the slots with a policy that acts for no env. A simulator is served by a policy in its own worker, or else
    by the policies in turn (`vla_rl.runtime.placement.assignments`)."""
    sims, policies = plan.hosting("sim"), plan.hosting("policy")
    by_worker = len(sims) >= len(policies)
    serving = set()
    for i, sim in enumerate(sims):
        for stage in range(plan.stages):
            turn = i if by_worker else i * plan.stages + stage
            serving.add(sim if sim in policies else policies[turn % len(policies)])
    return [policy for policy in policies if policy not in serving]


def check_acts(plan: Plan) -> None:
    """Raise DoesNotFit for a plan that the runtime cannot execute."""
    sims, policies = plan.hosting("sim"), plan.hosting("policy")
    together = set(sims) <= set(policies)
    near = set(sims) & set(policies)
    if plan.concurrent_lanes and near:
        raise DoesNotFit(
            f"lanes that step at the same time need simulators in separate workers, and {len(near)} of "
            f"{len(sims)} also act; choose disaggregated or hybrid, or let their envs step together"
        )
    idle = idle_policies(plan)
    if idle:
        raise DoesNotFit(
            f"{len(policies)} policy workers need a lane each, and {there_are(len(sims) * plan.stages)}, of which "
            f"{len(idle)} would get none; give the simulators more workers (sim, sim_workers) or the policies fewer "
            f"devices"
        )
    if plan.batching.max_wait_s is not None and (together or len(sims) * plan.stages <= len(policies)):
        why = "simulates its own envs" if together else "acts for one lane"
        raise DoesNotFit(
            f"the placement plans dynamic batching with max_wait_s {plan.batching.max_wait_s:g}, and there is nothing "
            f"to wait for: every policy worker {why}; leave it out, or give a policy several lanes of other sim "
            f"workers (placement.lanes, or more sim workers)"
        )


def check_lanes(job: Job, workers: int, stages: int) -> None:
    """Raise DoesNotFit if envs cannot be split evenly over the lanes of this many sim workers."""
    lanes = workers * stages
    if job.num_envs % lanes:
        what, detail = ("workers", "") if stages == 1 else ("lanes", f" ({workers} sim workers x {stages})")
        raise DoesNotFit(
            f"{job.num_envs} envs cannot be shared evenly by {lanes} {what}{detail}; set env.num_envs to a multiple of "
            f"{lanes}, or choose a number of {what} that divides {job.num_envs}"
        )


def _check_shares(plan: Plan, cluster: Cluster) -> None:
    """Raise DoesNotFit if workers ask for more than the cluster, or their node, has."""
    nodes = {node.name: node for node in cluster.nodes}
    unknown_nodes = sorted({slot.node for slot in plan.slots if slot.node is not None} - nodes.keys())
    if unknown_nodes:
        raise DoesNotFit(f"no node is named {unknown_nodes[0]!r}; there are: {', '.join(nodes)}")
    everywhere: list[tuple[str | None, Cluster | Node]] = [(None, cluster), *nodes.items()]
    for name, capacity in everywhere:
        slots = [slot for slot in plan.slots if name in (None, slot.node)]
        for what, needed, have in (
            ("CPU", sum(slot.cpus for slot in slots), capacity.cpus),
            ("GPU", sum(slot.gpus for slot in slots), capacity.gpus),
        ):
            if needed > have + 1e-6:
                where = "" if name is None else f" on node {name!r}"
                raise DoesNotFit(
                    f"{len(slots)} workers need {format_count(needed, what)}{where}, and {there_are(have)}"
                )
    most_cpus = max((node.cpus for node in cluster.nodes), default=0.0)
    for slot in plan.slots:
        if slot.cpus > most_cpus + 1e-6:
            raise DoesNotFit(f"a worker needs {slot.cpus:g} CPUs on one node, and the largest has {most_cpus:g}")


def _check_memory(plan: Plan, cluster: Cluster, job: Job, workers: int) -> None:
    """Raise DoesNotFit if simulators exceed the host memory of their nodes."""
    memory_of_node: Mapping[str | None, int] = {
        None: cluster.memory,
        **{node.name: node.memory for node in cluster.nodes},
    }
    for name, memory in memory_of_node.items():
        sim_workers = sum("sim" in slot.roles and slot.node == name for slot in plan.slots)
        envs = job.num_envs * sim_workers // workers
        needed = envs * job.env_memory
        if needed > memory:
            raise DoesNotFit(
                f"{envs} envs of {job.env} need about {needed / 2**30:.1f} GiB of memory "
                f"({job.env_memory / 2**30:.1f} GiB each), and there are {memory / 2**30:.1f} GiB"
                f"{'' if name is None else f' on node {name!r}'}; "
                f"at most {memory // job.env_memory} envs fit: lower env.num_envs"
            )
