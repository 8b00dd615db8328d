"""A process's limits: CPUs, memory and processes of the machine and its control groups (1 and 2), as of containers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FEW_PROCESSES = 400
"""Processes and threads below which a run on Ray may not start: one with two workers takes about 250."""


def count_cpus() -> int:
    """Return the CPUs that this process may use: those of its affinity, or a quota; at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = _read_limits("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",))
    return max(1, min([usable, *(quota // period for _, quota, period in limits)]))


def read_memory() -> tuple[int, int]:
    """Return the bytes of memory, total and available. What a group uses for cached files is available."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    for folder, limit, used in _read_limits("memory", *files):
        counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = [counts.get(f"total_{kind}_file", counts.get(f"{kind}_file", 0)) for kind in ("active", "inactive")]
        total, available = min(total, limit), min(available, limit - used + sum(map(int, cached)))
    return total, max(0, available)


def count_free_processes() -> int | None:
    """Return how many more processes and threads the groups of this process allow; None: any number."""
    files = "pids.max", "pids.current"
    return min((limit - used for _, limit, used in _read_limits("pids", files, files)), default=None)


def _read_limits(controller: str, v1: Sequence[str], v2: Sequence[str]) -> Iterator[tuple[Path, int, int]]:
    """Yield (folder, limit, second number) of this process's group and of those above that have a limit. `v1`, `v2`:
    files that hold the two numbers. A container that sees its own groups alone has them at the root."""
    memberships = MEMBERSHIP.read_text(encoding="utf-8").splitlines() if MEMBERSHIP.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in memberships):
        if controllers and controller not in controllers.split(","):
            continue
        root, names = (GROUPS / controller, v1) if controllers else (GROUPS, v2)
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # a group without this limit, or "max"
                limit, second = [int(part) for name in names for part in (folder / name).read_text("ascii").split()]
                if limit >= 0 and folder.is_relative_to(root):
                    yield folder, limit, second
