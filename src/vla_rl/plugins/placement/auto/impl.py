"""Automatic placement: simulates every split of the devices and takes the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vla_rl.core.errors import format_count
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, MeasureFirst, Plan
from vla_rl.plugins.placement.auto.config import AutoConfig
from vla_rl.toolkit.placement.devices import ROLES, Device, arrange_workers, busy_devices

STAGES = (1, 2, 4)
GAIN = 1e-6
"""Relative speed-up of an iteration that a split needs to be preferred to a simpler one."""
Split = tuple[Mapping[str, Sequence[Device]], int]
"""Devices of each role, and the number of pipeline stages."""


class Auto(Placement):
    """Placement by the predicted time of an iteration."""

    def __init__(self, config: AutoConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        if job.forecast is None:
            raise MeasureFirst(
                f"auto chooses by what a step of each role takes, and 0 of 3 are measured yet: a run does that first "
                f"({job.num_envs} envs on {format_count(cluster.cpus, 'CPU')} and {format_count(cluster.gpus, 'GPU')})"
            )
        best: tuple[float, Plan] | None = None
        reasons, devices = [], busy_devices(cluster)
        for devices_of, stages in list_splits(devices, job.num_envs):
            try:
                plan = arrange_workers(
                    cluster, job, devices_of, stages=stages, offload=self.config.offload.offloaded_roles
                )
            except DoesNotFit as exc:
                reasons.append(str(exc))
                continue
            seconds = job.forecast(plan)
            if best is None or seconds < best[0] * (1 - GAIN):
                best = seconds, plan
        if best is None:
            raise DoesNotFit(
                f"none of {len(reasons)} ways to device {job.num_envs} envs on {len(devices)} devices fits; the "
                f"simplest: {reasons[0] if reasons else 'no number of workers divides the envs'}"
            )
        return best[1]


def list_splits(devices: Sequence[Device], envs: int) -> Iterator[Split]:
    """Yield every split whose lanes share the envs evenly, fewest workers and lanes first: all roles on all devices;
    learners on all and simulators and policies on a part each, with 1, 2 or 4 pipeline stages; each role on a part."""
    count = len(devices)
    if envs % count == 0:
        yield dict.fromkeys(ROLES, devices), 1
    for stages in STAGES:
        for sim in range(1, count):
            if envs % (sim * stages) == 0 and sim * stages >= count - sim:
                yield {"sim": devices[:sim], "policy": devices[sim:], "learner": devices}, stages
    for sim in range(1, count):
        for acting in range(sim + 1, count):
            if envs % sim == 0 and sim >= acting - sim:
                yield {"sim": devices[:sim], "policy": devices[sim:acting], "learner": devices[acting:]}, 1
