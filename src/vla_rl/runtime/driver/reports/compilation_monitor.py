"""What the compiler of all workers does during a run."""

from __future__ import annotations

import logging

from vla_rl.core.spec.spec import Spec, has_own_policy
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.toolkit.models.acting.compilation import CompilationReport

logger = logging.getLogger(__name__)


class CompilationMonitor:
    """Reports of the workers whose models may be compiled."""

    def __init__(self, fleet: Fleet, spec: Spec) -> None:
        self._fleet = fleet
        self._remote = spec.runtime.backend != "local"
        modes = {spec.train.compile, spec.rollout.compile} - {None, "off"}
        self._workers = [
            worker
            for worker in fleet.workers
            if {"policy", "learner"} & set(worker.assignment.slot.roles)
            and not has_own_policy(spec)
            and (modes or worker.assignment.slot.device.startswith("cuda"))
        ]

        self.notes: tuple[str, ...] = ()
        """Remarks of the compilers so far."""

    def collect_metrics(self) -> dict[str, float]:
        """Return what the compilers did since the last time, and log their remarks. Empty if no model is compiled."""
        answers = self._fleet.get_all([worker.call(HostInterface.compilation_report) for worker in self._workers])
        reports = [report for report in answers if report is not None]
        if not reports:
            return {}
        merged = CompilationReport.merge_reports(reports)
        for note in merged.notes if self._remote else ():  # in this process the workers have logged them
            logger.warning("%s", note)
        self.notes = (*self.notes, *merged.notes)
        return merged.to_metrics()
