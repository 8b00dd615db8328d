"""Collocated placement: all roles on all devices (RLinf-VLA 4.1.1)."""

from __future__ import annotations

from vla_rl.core.errors import there_are
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Plan
from vla_rl.plugins.placement.collocated.config import CollocatedConfig
from vla_rl.toolkit.placement.checks import check_lanes
from vla_rl.toolkit.placement.devices import ROLES, arrange_workers, busy_devices, find_devices


class Collocated(Placement):
    """Placement of all roles in every worker."""

    def __init__(self, config: CollocatedConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        config = self.config
        if config.devices is None:
            workers = config.workers or cluster.gpus or max(1, min(config.cpu_workers, int(cluster.cpus)))
            devices = busy_devices(cluster)[:workers]
        else:
            devices = find_devices("devices", str(config.devices), cluster)
            workers = len(devices)
        check_lanes(job, workers, 1)
        if workers > cluster.cpus:
            raise DoesNotFit(
                f"{workers} workers need a CPU core each, and {there_are(cluster.cpus)}; lower placement.workers"
            )
        if cluster.gpus and workers > cluster.gpus:
            raise DoesNotFit(
                f"{workers} workers need a GPU each, and {there_are(cluster.gpus)}; lower placement.workers"
            )
        return arrange_workers(cluster, job, dict.fromkeys(ROLES, devices), offload=config.offload.offloaded_roles)
