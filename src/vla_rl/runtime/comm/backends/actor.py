"""A worker as a Ray actor: one thread runs its calls in order, and concurrency groups run calls at the same time.
docs/explanation/threads.md says which group runs what, and which locks it may hold."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from vla_rl.runtime.comm.interfaces import MakeHost
from vla_rl.runtime.comm.peers import RayPeers
from vla_rl.runtime.comm.shared_memory import host_key
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.processes import ignore_signals

# For simulators in an interpreter with NumPy 1: arrays that NumPy 2 pickled name numpy._core.numeric, which it lacks.
if np.lib.NumpyVersion(np.__version__) < "2.0.0":
    sys.modules.setdefault("numpy._core.numeric", importlib.import_module("numpy.core.numeric"))

BY_REFERENCE = "\0reference"
"""Placeholder for an argument that travels by reference."""


F = TypeVar("F", bound=Callable[..., Any])


def _answered_by_monitor(method: F) -> F:
    """Run the method in the concurrency group "monitor", which answers while others are stuck."""
    cast(Any, method).__ray_concurrency_group__ = "monitor"
    return method


class Actor:
    """Ray actor around a `WorkerHost`."""

    def __init__(self, make_host: MakeHost, data: dict[str, Any], assignment: Assignment):
        ignore_signals()  # they reach a whole process group; the driver decides when workers end
        # arrays from the object store are read-only; nothing here writes to what it was given
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.worker = make_host(data, assignment, lambda: None)

    def call(self, request: bytes, *referenced: Any) -> Any:
        """Run a call, in the concurrency group of Ray that the caller names, or in the one thread of the default group.
        `request` holds (role, method, arguments) in one piece, which Ray sends faster than one by one. `BY_REFERENCE`
        stands for the next of the arguments that came by reference."""
        role, method, arguments = pickle.loads(request)  # noqa: S301 - from our own driver
        references = iter(referenced)
        return self.worker.call(
            role, method, *(next(references) if isinstance(a, str) and a == BY_REFERENCE else a for a in arguments)
        )

    def connect(self, actors: Mapping[int, Any]) -> None:
        """Connect this worker to the workers of these actors, whose simulators its policy acts for."""
        assignment = self.worker.assignment
        self.worker.connect_peers(RayPeers(assignment.index, actors, assignment.concurrent_lanes))

    @_answered_by_monitor
    def request_stop(self) -> None:
        """End the running rollout or evaluation early."""
        self.worker.stop_requested = lambda: True

    @_answered_by_monitor
    def activity(self) -> tuple[str, float]:
        """Return the longest-running activity and its last heartbeat."""
        return self.worker.longest_activity

    @_answered_by_monitor
    def process(self) -> tuple[tuple[str, str] | None, int]:
        """Return the `host_key` of this process's machine, and the process id."""
        return host_key(), os.getpid()

    @_answered_by_monitor
    def progress(self) -> RolloutProgress:
        """Return how far this worker is with what it rolls out."""
        return self.worker.rollout_progress()
