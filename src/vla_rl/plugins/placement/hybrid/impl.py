"""Hybrid placement: simulators and policies on their own devices, which learners share (RLinf-VLA 4.1.3)."""

from __future__ import annotations

from vla_rl.core.errors import there_are
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Plan
from vla_rl.plugins.placement.hybrid.config import HybridConfig
from vla_rl.toolkit.placement.devices import ROLES, Device, arrange_workers, find_devices, free_devices, refuse_overlap


class Hybrid(Placement):
    """Placement of simulators and policies on separate devices, which learners share."""

    def __init__(self, config: HybridConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        config = self.config
        named = {role: getattr(config, role) for role in ROLES}
        of: dict[str, list[Device]] = {
            r: find_devices(r, text, cluster) for r, text in named.items() if text is not None
        }
        missing = [role for role in ("sim", "policy") if role not in of]
        left = free_devices(cluster, [p for role in ("sim", "policy") for p in of.get(role, ())], len(missing))
        if len(left) < len(missing):
            raise DoesNotFit(
                f"{' and '.join(missing)} need a separate device each, and {there_are(len(left))} left; put "
                f"simulators on CPUs (sim: cpu), let both share a GPU (sim: 0, policy: 0, sim_workers: 1), or choose "
                f"collocated"
            )
        for i, role in enumerate(missing):
            of[role] = left[i * len(left) // len(missing) : (i + 1) * len(left) // len(missing)]
        if "learner" not in of:
            rollout = [device for role in ("sim", "policy") for device in of[role] if device.index is not None]
            of["learner"] = free_devices(cluster, (), 0) or list(dict.fromkeys(rollout))
        if config.sim_workers is None:
            refuse_overlap("sim", "policy", of, cluster, "they run side by side; workers share a device by sim_workers")
        return arrange_workers(
            cluster,
            job,
            of,
            sim_workers=config.sim_workers,
            stages=config.pipeline_stages,
            lanes=config.lanes,
            batching=config.batching,
            offload=config.offload.offloaded_roles,
        )
