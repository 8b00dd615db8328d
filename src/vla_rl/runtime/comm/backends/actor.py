"""A worker as a Ray actor."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_rl.runtime.comm.channel import RayPeers
from vla_rl.runtime.comm.interfaces import MakeHost
from vla_rl.runtime.comm.shared_memory import host_key
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.processes import ignore_signals

if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # simulators in an old interpreter: read what NumPy 2 has pickled
    sys.modules.setdefault("numpy._core.numeric", importlib.import_module("numpy.core.numeric"))

HERE = "\0reference"
"""Stands for an argument that travels by reference."""


class Actor:
    def __init__(self, make_host: MakeHost, data: dict[str, Any], assignment: Assignment):
        ignore_signals()  # of a whole job or process group; the driver decides
        # arrays from the object store are read-only; nothing here writes to what it was given
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.worker = make_host(data, assignment, lambda: None)

    def call(self, order: bytes, *referenced: Any) -> Any:
        """`order`: (role, method, arguments) in one piece, which Ray sends faster than one by one; `HERE` stands for
        the next of those that came by reference."""
        role, method, arguments = pickle.loads(order)  # noqa: S301 - from our own driver
        came = iter(referenced)
        return self.worker.call(
            role, method, *(next(came) if isinstance(a, str) and a == HERE else a for a in arguments)
        )

    def beside(self, order: bytes, *referenced: Any) -> Any:
        """A call in a second thread, while the policy plays."""
        return self.call(order, *referenced)

    beside.__ray_concurrency_group__ = "beside"  # type: ignore[attr-defined]

    def weights(self, order: bytes, *referenced: Any) -> Any:
        """A call in a third thread: weights are swapped while the policy plays."""
        return self.call(order, *referenced)

    weights.__ray_concurrency_group__ = "weights"  # type: ignore[attr-defined]

    def waiting(self, order: bytes, *referenced: Any) -> Any:
        """A call in a thread of its own: it waits for what is played, or for what is imagined."""
        return self.call(order, *referenced)

    waiting.__ray_concurrency_group__ = "waiting"  # type: ignore[attr-defined]

    def practice(self, order: bytes, *referenced: Any) -> Any:
        """A call in one of two threads: the policy practises, in a world model that may be here too."""
        return self.call(order, *referenced)

    practice.__ray_concurrency_group__ = "practice"  # type: ignore[attr-defined]

    def lane(self, order: bytes, *referenced: Any) -> Any:
        """A call in one of as many threads as there are lanes that work at the same time."""
        return self.call(order, *referenced)

    lane.__ray_concurrency_group__ = "lanes"  # type: ignore[attr-defined]

    def meet(self, actors: Mapping[int, Any]) -> None:
        own = self.worker.assignment
        self.worker.meet(RayPeers(own.index, actors, own.side_by_side))

    def leave_play(self) -> None:
        self.worker.stop_requested = lambda: True

    leave_play.__ray_concurrency_group__ = "monitor"  # type: ignore[attr-defined]

    def doing(self) -> tuple[str, float]:
        return self.worker.doing

    doing.__ray_concurrency_group__ = "monitor"  # type: ignore[attr-defined]

    def process(self) -> tuple[tuple[str, str] | None, int]:
        """The machine, as `host_key`, and the number of this process."""
        return host_key(), os.getpid()

    process.__ray_concurrency_group__ = "monitor"  # type: ignore[attr-defined]

    def played(self) -> RolloutProgress:
        return self.worker.count()

    played.__ray_concurrency_group__ = "monitor"  # type: ignore[attr-defined]
