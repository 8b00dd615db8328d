"""Resources of a Ray cluster, and their reservation for a plan's workers: a placement group a bundle a device."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from vla_rl.core.errors import WorkerDied, format_count
from vla_rl.core.plan import DoesNotFit, Node, Slot
from vla_rl.toolkit.process_limits import read_memory

SHARED = Path("/dev/shm")  # noqa: S108 - where Ray keeps what processes share
LEAST_SHARED = 2**28
"""256 MiB; Docker gives a container 64 MiB by default."""
STORE_SHARE, LARGEST_FILE = 0.3, 10**10
"""Ray's defaults: share of the available memory, and most bytes of files that stand in for shared memory."""
PATIENCE_S = 60.0
"""Seconds that other work on the cluster gets to end, and a lost node to come back."""
NODE_LABEL = "ray.io/node-id"


def nodes_of(ray: Any) -> list[tuple[str, Node]]:
    """Return the Ray id and the resources of each live node. Nodes with the same name are numbered: `a`, `a#2`."""
    seen: dict[str, int] = {}
    nodes = []
    for node in sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeName"], n["NodeID"])):
        name, resources = node["NodeName"], node["Resources"]
        seen[name] = seen.get(name, 0) + 1
        nodes.append(
            (
                node["NodeID"],
                Node(
                    name=name if seen[name] == 1 else f"{name}#{seen[name]}",
                    cpus=resources.get("CPU", 0.0),
                    gpus=int(resources.get("GPU", 0)),
                    memory=int(resources.get("memory", 0)),
                ),
            )
        )
    return nodes


def bundles_of(slots: Sequence[Slot]) -> tuple[list[dict[str, float]], list[str | None], list[int]]:
    """Return (bundles' resources, their nodes, slots' bundles). Ray gives a bundle's actors one GPU: slots share."""
    bundles: list[dict[str, float]] = []
    nodes: list[str | None] = []
    bundle_of: list[int] = []
    shared: dict[tuple[str | None, int], int] = {}
    for slot in slots:
        here = shared.get((slot.node, slot.index)) if slot.gpus and slot.index is not None else None
        if here is None:
            here = len(bundles)
            bundles.append({"CPU": 0.0})
            nodes.append(slot.node)
            if slot.gpus:
                bundles[here]["GPU"] = 0.0
                if slot.index is not None:
                    shared[slot.node, slot.index] = here
        bundles[here]["CPU"] = rounded_down(bundles[here]["CPU"] + slot.cpus)
        if slot.gpus:
            bundles[here]["GPU"] = 1.0 if slot.index is not None else slot.gpus
        bundle_of.append(here)
    return bundles, nodes, bundle_of


def reserve_slots(ray: Any, slots: Sequence[Slot], deadline: float) -> tuple[Any, list[int]]:
    """Reserve what the slots need. Return (placement group, bundle of each slot). Raises WorkerDied when a node has
    left the cluster; DoesNotFit when others use the resources."""
    bundles, nodes, bundle_of = bundles_of(slots)
    patience = min(PATIENCE_S, deadline)
    known: dict[str, str] | None = None
    group: Any = None
    until = 0.0
    while True:
        alive = {node.name: identity for identity, node in nodes_of(ray)}
        ids = {name: identity for name, identity in alive.items() if name in nodes}
        gone = sorted({name for name in nodes if name is not None} - ids.keys())
        if ids != known:  # Ray calls a lost node alive for some seconds, and one that is back has another id
            known = ids
            until = monotonic() + patience
            if group is not None:
                ray.util.remove_placement_group(group)
            group = None
            if not gone:
                selectors = [{} if name is None else {NODE_LABEL: ids[name]} for name in nodes]
                group = ray.util.placement_group(bundles, "PACK", bundle_label_selector=selectors)
        if group is None:
            sleep(1)
        elif group.wait(1):  # whole seconds: Ray cuts off fractions, and does not wait at all
            return group, bundle_of
        if monotonic() > until:
            break
    if group is None:
        raise WorkerDied(
            f"node {gone[0]!r} left the cluster and did not come back within {patience:g} s; there are: "
            f"{', '.join(alive)}"
        )
    ray.util.remove_placement_group(group)
    free = ray.available_resources()
    raise DoesNotFit(
        f"the workers need {_format_bundles(bundles, nodes)}, and of the cluster's CPUs {free.get('CPU', 0):g} "
        f"and of its GPUs {free.get('GPU', 0):g} are free after {patience:g} s of waiting; stop what uses the others, "
        f"or place on fewer devices"
    )


def is_node_alive(ray: Any, group: Any, bundle: int) -> bool:
    """Return whether the node of a bundle is alive."""
    node = ray.util.placement_group_table(group)["bundles_to_node_id"].get(bundle)
    return any(node == identity for identity, _ in nodes_of(ray))


def choose_store(folder: Path) -> dict[str, Any]:
    """Return the options of Ray's object store on this machine: in shared memory, or in files of `folder` where there
    is too little, as in a container that Docker starts by default. In both cases Ray writes what does not fit to files.
    """
    if sys.platform != "linux":
        return {}
    share = int(STORE_SHARE * read_memory()[1])
    free = shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0
    if free >= LEAST_SHARED:
        return {"object_store_memory": min(share, int(0.9 * free))}
    return {"object_store_memory": min(share, LARGEST_FILE), "_plasma_directory": str(folder)}


def rounded_down(cpus: float) -> float:
    """Round down to Ray's resolution of a ten-thousandth, so that shares of all CPUs never add up to more than all."""
    # 0.57 * 10,000 is 5,699.999999999999 in floating point, and stays 0.57.
    return math.floor(cpus * 10_000 + 1e-3) / 10_000


def _format_bundles(bundles: Sequence[dict[str, float]], nodes: Sequence[str | None]) -> str:
    texts = []
    for name in dict.fromkeys(nodes):
        here = [bundle for bundle, node in zip(bundles, nodes, strict=True) if node == name]
        cpus, gpus = (sum(bundle.get(kind, 0.0) for bundle in here) for kind in ("CPU", "GPU"))
        where = "" if name is None else f" on node {name!r}"
        texts.append(f"{format_count(cpus, 'CPU')} and {format_count(gpus, 'GPU')}{where}")
    return ", ".join(texts)
