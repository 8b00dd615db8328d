"""Settings of simulator processes, which `toolkit/envs/subproc_envs.py` implements. Cheap to import."""

from __future__ import annotations

import math
from typing import Any

from attrs import evolve, field, frozen
from attrs import validators as v

from vla_rl.toolkit.process_limits import count_cpus

AT_LEAST_ONE: Any = v.optional(v.ge(1))


@frozen(kw_only=True)
class Processes:
    """Settings of the processes that envs live in. A plugin offers them as its setting `processes`."""

    apart: bool | None = None
    """Envs live in separate processes (true) or in the worker's (false); null: separate for more than one env."""
    envs_per_process: int | None = field(default=1, validator=AT_LEAST_ONE)
    """Envs that take turns in a process; null: enough for one process per core of the worker."""
    deadline_s: float = field(default=180.0, validator=v.gt(0))
    """Seconds after which an env that does not answer counts as hung and is replaced; building a scene counts too. Envs
    that share a process have the sum of their times."""
    recycle_episodes: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Episodes after which an env gets a fresh process; null: never."""
    recycle_mib: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Resident memory in MiB above which an env gets a fresh process before its next episode; null: never."""

    @recycle_episodes.validator
    @recycle_mib.validator
    def _check_recycling(self, attribute: Any, value: int | None) -> None:
        if value is not None and self.envs_per_process != 1:
            raise ValueError("envs that share a process cannot get a fresh one; also give envs_per_process: 1")

    def split_envs(self, num_envs: int) -> list[range]:
        """Return the range of envs that live in each process, as even as possible."""
        each = self.envs_per_process
        count = count_cpus() if each is None else math.ceil(num_envs / each)
        count = min(count, num_envs)
        return [range(num_envs * i // count, num_envs * (i + 1) // count) for i in range(count)]


@frozen(kw_only=True)
class SharedProcesses(Processes):
    """Settings of processes for simulators whose envs share much: libraries, models, shaders, textures."""

    envs_per_process: int | None = field(default=None, validator=AT_LEAST_ONE)
    """Envs that take turns in a process; null: enough for one process per core of the worker."""


def independent_envs(config: Any) -> bool:
    """Return whether a simulator with these settings can step some envs while others reset. Its setting
    `independent_envs` decides if it has one; otherwise each env must have its own process (`processes`)."""
    setting, processes = getattr(config, "independent_envs", None), getattr(config, "processes", None)
    return bool(setting) if setting is not None else isinstance(processes, Processes) and processes.apart is not False


def in_processes(config: Any) -> Any:
    """Return these settings for one env out of several of its worker: in a process, as for more than one env."""
    processes = getattr(config, "processes", None)
    if not isinstance(processes, Processes):
        return config
    return evolve(config, processes=evolve(processes, apart=True))


SMALLEST, LARGEST = 8, 1024
"""Bounds of a camera image's height and width, in pixels."""


def check_camera_size(name: str, size: int) -> None:
    """Raise ValueError unless images of this many pixels a side can be rendered and used."""
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"camera {name!r} has {size} pixels; give {SMALLEST} to {LARGEST} (224 for most checkpoints)")
