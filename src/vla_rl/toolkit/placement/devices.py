"""Device lists of specs, and plans made from them. The shared part of strategies, which say which role is where.

A device is a GPU. On a cluster without any it is a CPU slot, of which each core has two: roles take turns, so a core
seldom serves both. Devices are numbered over all nodes, in the order of the nodes' names.

    0-3          devices 0, 1, 2 and 3            0,2          two of them           [0, 2]       the same
    box-a:0-1    the first two of node box-a      box-*:0-1    of each such node
    cpu          the CPUs of every node           box-*:cpu    of each such node     (simulators only)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import inf
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.errors import there_are
from vla_rl.core.plan import Batching, Cluster, DoesNotFit, Job, Node, Plan, Slot
from vla_rl.toolkit.placement.checks import check_lanes, validate_plan

Lanes = Literal["stages", "envs"] | int


def valid_lanes(instance: Any, attribute: Any, value: Lanes) -> None:
    """Validate a number of envs (attrs validator)."""
    if isinstance(value, int) and value < 1:
        raise ValueError(f"a lane of {value} envs; give 1 or more, envs (a lane each) or stages")


def valid_seconds(instance: Any, attribute: Any, value: float | None) -> None:
    """Validate a number of seconds, or None (attrs validator)."""
    if value is not None and not 0 <= value < inf:
        raise ValueError(f"a wait of {value} seconds; give 0 or more, or null")


@frozen(kw_only=True)
class BatchingSettings:
    """Dynamic batching of a policy: when it infers."""

    max_batch: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Most envs in one inference; null: all that the policy acts for."""
    max_wait_s: float | None = field(default=0.0, validator=valid_seconds)
    """Seconds that the oldest request waits for a fuller batch; 0: infer with whatever waits; null: wait for the whole
    batch."""


def plan_lanes(
    job: Job, sims: int, policies: int, stages: int, lanes: Lanes, batching: BatchingSettings | None
) -> dict[str, Any]:
    """Return `stages`, `concurrent_lanes` and `batching` for this many sim and policy workers. Raise DoesNotFit."""
    concurrent = lanes != "stages"
    if concurrent:
        check_lanes(job, sims, 1)
        envs, of_lane = job.num_envs // sims, 1 if lanes == "envs" else int(lanes)
        if envs % of_lane:
            raise DoesNotFit(
                f"the {envs} envs of a sim worker cannot be divided into lanes of {of_lane}; set placement.lanes to a "
                f"number that divides {envs}, or to envs"
            )
        stages = envs // of_lane
    waits = 0.0 if concurrent and sims * stages > policies else None
    chosen = (
        Batching(max_wait_s=waits)
        if batching is None
        else Batching(max_batch=batching.max_batch, max_wait_s=batching.max_wait_s)
    )
    return {"stages": stages, "concurrent_lanes": concurrent, "batching": chosen}


Devices = str | int | tuple[int, ...] | None
ROLES = ("sim", "policy", "learner")
MOST_WORKERS = 10_000
SLOTS_PER_CORE = 2
PART = re.compile(r"(?:([^:,\s]+):)?(?:(\d+)(?:-(\d+))?|cpu)")


@frozen
class Device:
    """A device of a node, or the node's CPUs (index None)."""

    node: str
    index: int | None


@frozen(kw_only=True)
class OffloadSettings:
    """Roles that free their device's memory (into host memory) while they are idle."""

    sim: bool = False
    """Offload simulators while the learners train."""
    policy: bool = False
    """Offload the weights of policies that share no worker with a learner, while the learners train."""
    learner: bool = False
    """Offload optimiser state and gradients in rollouts, and weights of learners that share no worker with a policy."""

    @property
    def offloaded_roles(self) -> frozenset[str]:
        return frozenset(role for role in ROLES if getattr(self, role))


def as_text(value: Devices) -> str | None:
    """Convert a list of devices to one text form, so that a spec reads back equal (attrs converter)."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return None if value is None else str(value)


def well_formed(instance: Any, attribute: Any, value: str | None) -> None:
    """Validate a list of devices; only simulators may name CPUs (attrs validator)."""
    for part in () if value is None else value.split(","):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} names no device; write 0, 0-3, 0,2, NODE:0-3, cpu or NODE:cpu")
        _, first, last = match.groups()
        if first is None and attribute.name != "sim":
            raise ValueError("only simulators are placed on CPUs by name; give devices such as 0-3")
        if last is not None and int(last) < int(first):
            raise ValueError(f"{part.strip()!r} counts downwards; write {last}-{first}")


@frozen(kw_only=True)
class RoleDevices:
    """Settings of strategies that give each role its devices."""

    sim: Devices = field(default=None, converter=as_text, validator=well_formed)
    """Devices of the simulators, one worker each, such as 0-3; or `cpu`, one worker per node."""
    policy: Devices = field(default=None, converter=as_text, validator=well_formed)
    """Devices of the policies, one worker each."""
    learner: Devices = field(default=None, converter=as_text, validator=well_formed)
    """Devices of the learners, one rank each."""
    sim_workers: int | None = field(default=None, validator=v.optional(v.and_(v.ge(1), v.le(MOST_WORKERS))))
    """Simulator workers, spread evenly over the devices or nodes of `sim`; workers on one GPU share it equally. Null:
    one each."""
    lanes: Lanes = field(default="stages", validator=valid_lanes)
    """Envs that step together in a sim worker: all, or with pipeline stages a part of them (stages); each env by
    itself, while others step and reset (envs); or this many envs at a time."""
    batching: BatchingSettings | None = None
    """Dynamic batching of the policies; null: infer when all envs wait (with pipeline stages: all of a lane), or, with
    `lanes: envs` or a number, as soon as any do."""
    offload: OffloadSettings = field(factory=OffloadSettings)
    """Roles that are moved to host memory between phases."""


def devices_of(cluster: Cluster) -> list[Device]:
    """Return all devices, in the order of their numbers."""
    counts = [(n, n.gpus if cluster.gpus else int(n.cpus * SLOTS_PER_CORE)) for n in _sort_nodes(cluster)]
    return [Device(node.name, index) for node, count in counts for index in range(count)]


def busy_devices(cluster: Cluster) -> list[Device]:
    """Return devices for workers that all work at once: all GPUs, or one CPU slot per core."""
    return devices_of(cluster)[:: 1 if cluster.gpus else SLOTS_PER_CORE]


def find_devices(role: str, text: str, cluster: Cluster) -> list[Device]:
    """Return the devices that a well-formed list names. Raise DoesNotFit."""
    devices: list[Device] = []
    kind, note = ("GPU", "") if cluster.gpus else ("CPU slot", f" ({SLOTS_PER_CORE} a core)")
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        assert match is not None
        pattern, first, last = match.groups()
        nodes = [node.name for node in _sort_nodes(cluster) if fnmatchcase(node.name, pattern or "*")]
        if not nodes:
            names = ", ".join(node.name for node in _sort_nodes(cluster))
            raise DoesNotFit(f"placement.{role}: no node is named {pattern!r}; there are: {names}")
        if first is None:
            devices += [Device(name, None) for name in nodes]
            continue
        everywhere = devices_of(cluster)
        pools = [everywhere] if pattern is None else [[d for d in everywhere if d.node == name] for name in nodes]
        for name, pool in zip(nodes, pools, strict=False):
            if int(last or first) >= len(pool):
                raise DoesNotFit(
                    f"placement.{role}: device {last or first} is needed, and {there_are(len(pool), kind)}{note}"
                    f"{'' if pattern is None else f' on node {name!r}'}{_format_numbers(pool)}"
                )
            devices += pool[int(first) : int(last or first) + 1]
    twice = [device for device, count in Counter(devices).items() if count > 1]
    if twice:
        raise DoesNotFit(f"placement.{role}: {text!r} names {_format_devices(twice, cluster)} twice")
    return devices


def free_devices(cluster: Cluster, taken: Iterable[Device], slots: int) -> list[Device]:
    """Return all GPUs that are not taken; without any GPU, up to `slots` CPU slots."""
    available = [device for device in devices_of(cluster) if device not in set(taken)]
    return available if cluster.gpus else available[:slots]


def refuse_overlap(a: str, b: str, of: Mapping[str, Sequence[Device]], cluster: Cluster, hint: str) -> None:
    """Raise DoesNotFit if two roles name the same device."""
    shared = [device for device in of[a] if device in set(of[b]) and device.index is not None]
    if shared:
        raise DoesNotFit(f"placement: {a} and {b} both name {_format_devices(shared, cluster)}; {hint}")


def arrange_workers(
    cluster: Cluster,
    job: Job,
    of: Mapping[str, Sequence[Device]],
    *,
    sim_workers: int | None = None,
    stages: int = 1,
    lanes: Lanes = "stages",
    batching: BatchingSettings | None = None,
    offload: frozenset[str] = frozenset(),
    apart: bool = False,
) -> Plan:
    """Return a plan with one worker per device. Roles that name the same device share its worker. Raise DoesNotFit.

    Args:
        of: role -> its devices.
        sim_workers: number of simulator workers, separate from other roles; None: one per device of `sim`.
        stages, lanes, batching: as `lanes.plan_lanes` takes them.
        offload: roles to offload.
        apart: roles that name the same device have separate workers there, with equal parts of it.
    """
    workers: list[tuple[Device, list[str]]] = []
    homes = of["sim"]
    if sim_workers is not None:
        if sim_workers % len(homes):
            raise DoesNotFit(f"{sim_workers} sim workers cannot be spread evenly over {len(homes)} devices")
        workers = [(device, ["sim"]) for device in homes for _ in range(sim_workers // len(homes))]
    together: dict[Any, list[str]] = {}
    for role in ROLES if sim_workers is None else ROLES[1:]:
        for device in of[role]:
            together.setdefault((device, role if apart else None), []).append(role)
    workers += [(device, roles) for (device, _), roles in together.items()]
    on_device = Counter(device for device, _ in workers)
    of_node: dict[str, list[Sequence[str]]] = {}
    for device, roles in workers:
        of_node.setdefault(device.node, []).append(roles)
    shares = {
        node.name: _share_cpus(node, of_node[node.name], cluster) for node in cluster.nodes if node.name in of_node
    }
    sims = sum("sim" in roles for _, roles in workers)
    arranged = plan_lanes(job, sims, len(of["policy"]), stages, lanes, batching)
    slots = []
    for device, roles in workers:
        gpu = bool(cluster.gpus) and device.index is not None
        slots.append(
            Slot(
                roles=tuple(roles),
                device="cuda" if gpu else "cpu",
                cpus=shares[device.node]["sim" in roles],
                gpus=_floor_share(1 / on_device[device]) if gpu else 0.0,
                node=device.node if len(cluster.nodes) > 1 else None,
                index=device.index,
            )
        )
    return validate_plan(Plan(slots=tuple(slots), offload=offload, **arranged), cluster, job)


def _share_cpus(node: Node, worker_roles: Sequence[Sequence[str]], cluster: Cluster) -> tuple[float, float]:
    """Return the CPUs of a node's workers without and with simulators. With GPUs, each worker without simulators gets a
    core, and the simulators share the rest; without GPUs, all workers share equally."""
    cpus = node.cpus
    if not cluster.gpus:
        share = cpus / len(worker_roles)
        share = float(int(share)) if share >= 1 else _floor_share(share)
        return share, share
    if len(worker_roles) > cpus:
        raise DoesNotFit(
            f"{len(worker_roles)} workers need a CPU core each, and {there_are(cpus)} on node {node.name!r}"
        )
    sims = sum("sim" in of for of in worker_roles)
    return 1.0, float((cpus - len(worker_roles) + sims) // max(sims, 1))


def _floor_share(share: float) -> float:
    """Round down to a thousandth, so that shares of one device never add up to more than it."""
    return math.floor(share * 1000) / 1000


def _sort_nodes(cluster: Cluster) -> list[Node]:
    return sorted(cluster.nodes, key=lambda node: node.name)


def _format_devices(devices: Sequence[Device], cluster: Cluster) -> str:
    one = len(cluster.nodes) == 1
    names = [f"{'' if one else f'{p.node}:'}{'cpu' if p.index is None else p.index}" for p in devices]
    return f"device{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _format_numbers(pool: Sequence[Device]) -> str:
    return f": 0-{len(pool) - 1}" if len(pool) > 1 else ": 0" if pool else ""
