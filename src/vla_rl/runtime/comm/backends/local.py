"""All roles in this process, for the debugger and for tests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any

from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.comm.backend import TICK_S, Backend
from vla_rl.runtime.comm.interfaces import HostInterface, MakeHost
from vla_rl.runtime.comm.remote import ConcurrencyGroup
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.placement.hardware import machine_resources
from vla_rl.toolkit.waiting import Work, list_running_work, listen_to_work

logger = logging.getLogger(__name__)


class LocalBackend(Backend):
    """One worker with all roles in this process. Calls run at once, so references are the results themselves."""

    def __init__(self, make_host: MakeHost) -> None:
        super().__init__()
        self._make_host = make_host
        self._listening = ExitStack()
        self.worker: HostInterface | None = None
        self._ticked = monotonic()

    def cluster_resources(self) -> Cluster:
        return machine_resources()

    def check_store(self, size: int) -> None:
        """Do nothing: results stay in this process."""

    def launch_workers(self, spec: Spec, assignments: Sequence[Assignment]) -> None:
        self._listening.enter_context(listen_to_work(self._tick_if_due))
        self.worker = self._make_host(spec, assignments[0], self._tick_if_due)
        self.worker.stop_requested = lambda: self.interrupts.requested

    def _tick_if_due(self) -> None:
        if monotonic() - self._ticked >= TICK_S:
            self._ticked = monotonic()
            self.tick()

    def starting_work(self) -> tuple[Work, ...]:
        return list_running_work()

    def read_progress(self, workers: Sequence[int]) -> RolloutProgress:
        assert self.worker is not None
        return self.worker.rollout_progress()

    def call_worker(
        self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1, group: ConcurrencyGroup = "call"
    ) -> Any:
        assert self.worker is not None
        self.interrupts.check_waiting()
        return self.worker.call(role, method, *arguments)

    def get(self, reference: Any) -> Any:
        return reference

    def get_all(self, references: Sequence[Any]) -> list[Any]:
        return list(references)

    def wait_for_any(self, references: Sequence[Any]) -> list[Any]:
        return list(references)

    def close(self) -> None:
        self._line.clear()
        self._listening.close()
        worker = self.worker
        self.worker = None
        for flaw in worker.close() if worker is not None else ():
            logger.warning("%s", flaw)
