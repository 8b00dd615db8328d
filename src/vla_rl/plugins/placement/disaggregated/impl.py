"""Disaggregated placement: each role on its own devices (RLinf-VLA 4.1.2)."""

from __future__ import annotations

from itertools import combinations

from vla_rl.core.errors import there_are
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Plan
from vla_rl.plugins.placement.disaggregated.config import DisaggregatedConfig
from vla_rl.toolkit.placement.devices import ROLES, Device, arrange_workers, find_devices, free_devices, refuse_overlap


class Disaggregated(Placement):
    """Placement of each role on its own devices."""

    def __init__(self, config: DisaggregatedConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        config = self.config
        named = {role: getattr(config, role) for role in ROLES}
        of: dict[str, list[Device]] = {
            r: find_devices(r, text, cluster) for r, text in named.items() if text is not None
        }
        for a, b in () if config.share_devices else combinations(of, 2):
            refuse_overlap(
                a, b, of, cluster, "each role has separate devices here; share_devices: true lets them share"
            )
        missing = [role for role in ROLES if role not in of]
        left = free_devices(cluster, [device for devices in of.values() for device in devices], len(missing))
        if len(left) < len(missing) and not (config.share_devices and left):
            raise DoesNotFit(
                f"{' and '.join(missing)} need a separate device each, and {there_are(len(left))} left; "
                f"put simulators on CPUs (sim: cpu), let roles share devices (share_devices: true), or choose hybrid "
                f"or collocated"
            )
        for i, role in enumerate(missing):
            if len(left) < len(missing):
                of[role] = [left[i * len(left) // len(missing)]]
                continue
            each = len(left) // len(missing)
            of[role] = left[i * each : len(left) if i == len(missing) - 1 else (i + 1) * each]
        return arrange_workers(
            cluster,
            job,
            of,
            sim_workers=config.sim_workers,
            lanes=config.lanes,
            batching=config.batching,
            offload=config.offload.offloaded_roles,
            apart=True,
        )
