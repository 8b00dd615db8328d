"""Settings of simulator processes. Light: plugins name it in their settings, `toolkit/envs/rows.py` obeys it."""

from __future__ import annotations

import math
import os
from typing import Any

from attrs import evolve, field, frozen
from attrs import validators as v

AT_LEAST_ONE: Any = v.optional(v.ge(1))


@frozen(kw_only=True)
class Processes:
    """The processes of simulator rows; a plugin offers this as its setting `processes`."""

    apart: bool | None = None
    """Rows in processes of their own, or all in the worker's; null: in their own when there are several rows."""
    rows_per_process: int | None = field(default=1, validator=AT_LEAST_ONE)
    """Rows that take turns in a process; null: as many as it takes for a process per core of the worker."""
    deadline_s: float = field(default=180.0, validator=v.gt(0))
    """Seconds after which a row that does not answer is taken for hung and replaced; building a scene counts too.
    Rows that share a process have as much together as apart."""
    recycle_episodes: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Episodes after which a row gets a fresh process; null: never."""
    recycle_mib: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Resident memory in MiB above which a row gets a fresh process before its next episode; null: never."""

    @recycle_episodes.validator
    @recycle_mib.validator
    def _alone(self, attribute: Any, value: int | None) -> None:
        if value is not None and self.rows_per_process != 1:
            raise ValueError("rows that share a process cannot get a fresh one; give rows_per_process: 1 beside it")

    def shares(self, rows: int) -> list[range]:
        """Which of so many rows live in each process, as even as can be."""
        each = self.rows_per_process
        count = len(os.sched_getaffinity(0)) if each is None else math.ceil(rows / each)
        count = min(count, rows)
        return [range(rows * i // count, rows * (i + 1) // count) for i in range(count)]


@frozen(kw_only=True)
class SharedProcesses(Processes):
    """For simulators whose rows have much to share: libraries, models, shaders, textures."""

    rows_per_process: int | None = field(default=None, validator=AT_LEAST_ONE)
    """Rows that take turns in a process; null: as many as it takes for a process per core of the worker."""


def rows_apart(config: Any) -> bool:
    """Whether a simulator with these settings can step some of its rows while others reset: `rows_apart` of the
    settings, where there is such a thing, says it; else that each row has a process of its own (`processes`)."""
    own, processes = getattr(config, "rows_apart", None), getattr(config, "processes", None)
    return bool(own) if own is not None else isinstance(processes, Processes) and processes.apart is not False


def in_processes(config: Any) -> Any:
    """These settings, for one row among others of its worker: in a process of its own, as where there are several."""
    processes = getattr(config, "processes", None)
    if not isinstance(processes, Processes):
        return config
    return evolve(config, processes=evolve(processes, apart=True))


SMALLEST, LARGEST = 8, 1024
"""Height and width of a camera's pictures, in pixels."""


def check_camera_size(name: str, size: int) -> None:
    """Raise ValueError unless pictures of this many pixels a side can be drawn and seen."""
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"camera {name!r} has {size} pixels; give {SMALLEST} to {LARGEST} (224 for most checkpoints)")
