"""Placements on devices that the spec names, or on equal shares of all (RLinf-VLA 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from vla_rl.core.errors import there_are
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Plan
from vla_rl.plugins.placement.fixed.config import CollocatedConfig, DisaggregatedConfig, HybridConfig
from vla_rl.toolkit.placement.checks import check_lanes
from vla_rl.toolkit.placement.devices import (
    ROLES,
    Device,
    RoleDevices,
    arrange_workers,
    busy_devices,
    find_devices,
    free_devices,
    refuse_overlap,
)


class Collocated(Placement):
    """Placement of all roles in every worker (4.1.1)."""

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


class Disaggregated(Placement):
    """Placement of each role on its own devices (4.1.2)."""

    def __init__(self, config: DisaggregatedConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        config = self.config
        of = _named_devices(config, cluster)
        for a, b in () if config.share_devices else combinations(of, 2):
            refuse_overlap(
                a, b, of, cluster, "each role has separate devices here; share_devices: true lets them share"
            )
        remedy = (
            "put simulators on CPUs (sim: cpu), let roles share devices (share_devices: true), or choose hybrid or "
            "collocated"
        )
        of |= _share_free_devices(cluster, of, ROLES, remedy, may_share=config.share_devices)
        return _arrange_roles(cluster, job, config, of, apart=True)


class Hybrid(Placement):
    """Placement of simulators and policies on separate devices, which learners share (4.1.3)."""

    def __init__(self, config: HybridConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        config = self.config
        of = _named_devices(config, cluster)
        remedy = (
            "put simulators on CPUs (sim: cpu), let both share a GPU (sim: 0, policy: 0, sim_workers: 1), or choose "
            "collocated"
        )
        of |= _share_free_devices(cluster, of, ("sim", "policy"), remedy)
        if "learner" not in of:
            rollout = [device for role in ("sim", "policy") for device in of[role] if device.index is not None]
            of["learner"] = free_devices(cluster, (), 0) or list(dict.fromkeys(rollout))
        if config.sim_workers is None:
            refuse_overlap("sim", "policy", of, cluster, "they run side by side; workers share a device by sim_workers")
        return _arrange_roles(cluster, job, config, of, stages=config.pipeline_stages)


def _named_devices(config: RoleDevices, cluster: Cluster) -> dict[str, list[Device]]:
    """Return role -> devices, for the roles whose devices the spec names."""
    named = {role: getattr(config, role) for role in ROLES}
    return {role: find_devices(role, text, cluster) for role, text in named.items() if text is not None}


def _share_free_devices(
    cluster: Cluster, of: Mapping[str, list[Device]], roles: Sequence[str], remedy: str, may_share: bool = False
) -> dict[str, list[Device]]:
    """Return devices for those of the roles that have none: equal shares of what is left, of which the last one also
    gets the remainder. Raise DoesNotFit for fewer devices than such roles, unless they `may_share` one."""
    missing = [role for role in roles if role not in of]
    left = free_devices(cluster, [device for role in roles for device in of.get(role, ())], len(missing))
    if len(left) < len(missing) and not (may_share and left):
        raise DoesNotFit(
            f"{' and '.join(missing)} need a separate device each, and {there_are(len(left))} left; {remedy}"
        )
    if len(left) < len(missing):
        return {role: [left[i * len(left) // len(missing)]] for i, role in enumerate(missing)}
    each = len(left) // max(len(missing), 1)
    shares = {role: left[i * each : (i + 1) * each] for i, role in enumerate(missing)}
    if missing:
        shares[missing[-1]] = left[(len(missing) - 1) * each :]
    return shares


def _arrange_roles(
    cluster: Cluster, job: Job, config: RoleDevices, of: dict[str, list[Device]], **further: Any
) -> Plan:
    """Return the plan of these devices with the workers, lanes and offloading of the settings. `further`: as
    `arrange_workers` takes it."""
    return arrange_workers(
        cluster,
        job,
        of,
        sim_workers=config.sim_workers,
        lanes=config.lanes,
        batching=config.batching,
        offload=config.offload.offloaded_roles,
        **further,
    )
