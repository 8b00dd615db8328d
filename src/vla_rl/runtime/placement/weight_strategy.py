"""Choice of the strategy that transfers weights to policies in other workers than the learners'."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster, Plan
from vla_rl.core.spec.sections import WeightStrategy

CHECKED = "set placement.weight_transfer: auto"


class TransferNotPossible(UserError):
    """The strategy of `placement.weight_transfer` cannot work between these workers. The message leaves out the key."""


@frozen(kw_only=True)
class WorkerLocation:
    """Machine and device of a worker; None where they are not known, before a run starts."""

    worker: int
    machine: Hashable
    """Key of the machine."""
    device: str
    """ "cpu" or "cuda"."""
    gpu: Hashable = None
    """Key of the GPU."""
    nccl: bool | None = None
    """Whether torch was built with NCCL there."""


def choose_strategy(
    requested: Literal["auto", "shared", "ipc", "nccl", "host"],
    learner: WorkerLocation,
    policies: Sequence[WorkerLocation],
) -> WeightStrategy:
    """Return the strategy from the first learner to these policies in other workers. Raises TransferNotPossible."""
    if not policies:
        return "shared"
    if requested == "auto":
        return _best_strategy(learner, policies)
    problem = {"shared": _shared_problem, "ipc": _ipc_problem, "nccl": _nccl_problem}.get(requested)
    text = problem(learner, policies) if problem else ""
    if text:
        raise TransferNotPossible(text)
    return requested


def planned_strategy(
    requested: Literal["auto", "shared", "ipc", "nccl", "host"], plan: Plan, cluster: Cluster, nccl: bool | None = None
) -> WeightStrategy:
    """Return the strategy under a plan, as far as the plan says where workers are. `nccl`: whether torch has NCCL on
    the machines of the run; None: not known. Raises TransferNotPossible."""
    only_node = cluster.nodes[0].name if len(cluster.nodes) == 1 else None
    locations = [
        WorkerLocation(
            worker=index,
            machine=slot.node or only_node,
            device="cpu" if slot.device == "cpu" else "cuda",
            nccl=nccl,
            gpu=None if slot.index is None else (slot.node or only_node, slot.index),
        )
        for index, slot in enumerate(plan.slots)
    ]
    learners = plan.hosting("learner")
    if not learners:
        return "shared"
    remote = [locations[index] for index in plan.hosting("policy") if index not in learners]
    return choose_strategy(requested, locations[learners[0]], remote)


def _best_strategy(learner: WorkerLocation, policies: Sequence[WorkerLocation]) -> WeightStrategy:
    everyone = (learner, *policies)
    if any(each.device != "cuda" or each.gpu is None for each in everyone):
        return "host"
    if not _ipc_problem(learner, policies) and learner.machine is not None:
        return "ipc"
    return "host" if _nccl_problem(learner, policies) else "nccl"


def _shared_problem(learner: WorkerLocation, policies: Sequence[WorkerLocation]) -> str:
    return (
        f"shared needs policy and learner in one worker, and {_name_policies(policies)} and learner worker "
        f"{learner.worker} are different workers; use placement {{type: collocated}}, or {CHECKED}"
    )


def _ipc_problem(learner: WorkerLocation, policies: Sequence[WorkerLocation]) -> str:
    everyone = (learner, *policies)
    need = "ipc needs the policies and the first learner on one CUDA device of one node"
    if on_cpu := [each for each in everyone if each.device != "cuda"]:
        return f"{need}, and {_name_workers(on_cpu)} on CPUs; use host, or {CHECKED}"
    if elsewhere := _other_locations(learner.machine, [(each, each.machine) for each in policies]):
        others = _name_workers(elsewhere)
        return f"{need}, and {others} on another node than worker {learner.worker}; use nccl, or {CHECKED}"
    if elsewhere := _other_locations(learner.gpu, [(each, each.gpu) for each in policies]):
        others = _name_workers(elsewhere)
        return f"{need}, and {others} on another GPU than worker {learner.worker}; use nccl, or {CHECKED}"
    return ""


def _nccl_problem(learner: WorkerLocation, policies: Sequence[WorkerLocation]) -> str:
    everyone = (learner, *policies)
    on_cpu = [each for each in everyone if each.device != "cuda"]
    if len(on_cpu) == len(everyone):
        return ""  # gloo
    if on_cpu:
        return (
            f"nccl needs the first learner and all policies on CUDA devices, or all of them on CPUs, and "
            f"{_name_workers(on_cpu)} on CPUs while others are on GPUs; use host, or {CHECKED}"
        )
    if lacking := [each for each in everyone if each.nccl is False]:
        return (
            f"nccl needs a torch that was built with NCCL, and torch {torch.__version__} of worker "
            f"{lacking[0].worker} was not; install a CUDA build for Linux, or use host"
        )
    workers: dict[Hashable, list[WorkerLocation]] = {}
    for each in everyone:
        if each.gpu is not None:
            workers.setdefault(each.gpu, []).append(each)
    for sharing in workers.values():
        if len(sharing) > 1:
            return (
                f"nccl needs a GPU for each of its ranks, and {_name_workers(sharing)} on the same one; use ipc where "
                "all policies share the GPU of the first learner, or host"
            )
    return ""


def _other_locations(key: Hashable, known: Sequence[tuple[WorkerLocation, Hashable]]) -> list[WorkerLocation]:
    """Return the workers whose key is known to differ from this one."""
    return [each for each, other in known if key is not None and other is not None and other != key]


def _name_policies(policies: Sequence[WorkerLocation]) -> str:
    numbers = ", ".join(str(each.worker) for each in policies)
    return f"policy worker{'s' if len(policies) > 1 else ''} {numbers}"


def _name_workers(workers: Sequence[WorkerLocation]) -> str:
    numbers = ", ".join(str(each.worker) for each in workers)
    return f"worker {numbers} is" if len(workers) == 1 else f"workers {numbers} are"
