"""Every split of the devices, simulated; the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, MeasureFirst, Plan
from vla_rl.plugins.placement.auto import AutoConfig
from vla_rl.toolkit.placement.devices import ROLES, Device, arrange, busy_devices

STAGES = (1, 2, 4)
GAIN = 1e-6
"""Part of an iteration by which a split has to be faster than a simpler one."""
Split = tuple[Mapping[str, Sequence[Device]], int]
"""Devices of each role, and pipeline stages."""


class Auto(Placement):
    def __init__(self, config: AutoConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        if job.forecast is None:
            raise MeasureFirst(
                f"auto chooses by what a step of each role takes, and 0 of 3 are measured yet: a run does that first "
                f"({job.num_envs} rows on {cluster.cpus:g} CPUs and {cluster.gpus} GPUs)"
            )
        best: tuple[float, Plan] | None = None
        reasons, devices = [], busy_devices(cluster)
        for devices_of, stages in splits(devices, job.num_envs):
            try:
                plan = arrange(cluster, job, devices_of, stages=stages, offload=self.config.offload.roles)
            except DoesNotFit as exc:
                reasons.append(str(exc))
                continue
            seconds = job.forecast(plan)
            if best is None or seconds < best[0] * (1 - GAIN):
                best = seconds, plan
        if best is None:
            raise DoesNotFit(
                f"none of {len(reasons)} ways to device {job.num_envs} rows on {len(devices)} devices fits; the "
                f"simplest: {reasons[0] if reasons else 'no number of workers divides the rows'}"
            )
        return best[1]


def splits(devices: Sequence[Device], rows: int) -> Iterator[Split]:
    """All whose lanes share the rows evenly, with fewer workers and lanes first: every role on all devices; learners on
    all and the others on a part each, in one lane or several; every role on a part."""
    count = len(devices)
    if rows % count == 0:
        yield dict.fromkeys(ROLES, devices), 1
    for stages in STAGES:
        for sim in range(1, count):
            if rows % (sim * stages) == 0 and sim * stages >= count - sim:
                yield {"sim": devices[:sim], "policy": devices[sim:], "learner": devices}, stages
    for sim in range(1, count):
        for acting in range(sim + 1, count):
            if rows % sim == 0 and sim >= acting - sim:
                yield {"sim": devices[:sim], "policy": devices[sim:acting], "learner": devices[acting:]}, 1
