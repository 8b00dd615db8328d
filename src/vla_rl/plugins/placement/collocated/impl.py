"""All roles on all devices (RLinf-VLA 4.1.1)."""

from __future__ import annotations

from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Plan, Slot
from vla_rl.plugins.placement.collocated import CollocatedConfig

ROLES = ("sim", "policy", "learner")


class Collocated(Placement):
    def __init__(self, config: CollocatedConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        workers = self.config.workers or max(cluster.gpus, 1)
        if job.num_envs % workers:
            raise DoesNotFit(
                f"{job.num_envs} rows cannot be shared evenly by {workers} workers; set env.num_envs to a multiple "
                f"of {workers}, or placement.workers to a divisor of {job.num_envs}"
            )
        if workers > cluster.cpus:
            raise DoesNotFit(
                f"{workers} workers need a CPU core each, and there are {cluster.cpus:g}; lower placement.workers"
            )
        if cluster.gpus and workers > cluster.gpus:
            raise DoesNotFit(
                f"{workers} workers need a GPU each, and there are {cluster.gpus}; lower placement.workers"
            )
        needed = job.num_envs * job.row_memory
        if needed > cluster.memory:
            raise DoesNotFit(
                f"{job.num_envs} rows of {job.env} need about {needed / 2**30:.1f} GiB of memory "
                f"({job.row_memory / 2**30:.1f} GiB each), and there are {cluster.memory / 2**30:.1f} GiB; "
                f"at most {cluster.memory // job.row_memory} rows fit: lower env.num_envs"
            )
        device, gpus = ("cuda", 1.0) if cluster.gpus else ("cpu", 0.0)
        slot = Slot(roles=ROLES, device=device, cpus=max(1.0, cluster.cpus // workers), gpus=gpus)
        return Plan(slots=(slot,) * workers)
