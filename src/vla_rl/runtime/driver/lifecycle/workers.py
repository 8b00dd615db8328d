"""The workers of a run, as the loop sees them: they evaluate, are watched, and end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define

from vla_rl.core.events import Evaluation
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.comm.handles import Fleet, Handle
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.runtime.comm.tracing import clock_ahead
from vla_rl.runtime.driver.collecting.collector import Collector
from vla_rl.runtime.driver.collecting.rollouts import SampleMemory
from vla_rl.runtime.driver.evaluation.evaluator import Enough, Evaluator
from vla_rl.runtime.driver.reports.compilation_monitor import CompilationMonitor
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.placement.hardware import describe_placement


@define(eq=False, slots=False)
class RunWorkers:
    """Evaluates, reports progress and times, and ends the workers: the `Workers` of a runtime."""

    spec: Spec
    info: EnvInfo
    collector: Collector
    evaluator: Evaluator
    memory: SampleMemory
    compilation: CompilationMonitor
    fault_log: FaultLog
    trace: Trace

    def __attrs_post_init__(self) -> None:
        self.fleet: Fleet = self.collector.fleet
        self._on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None

    def listen(
        self,
        on_progress: Callable[[str, int, int], None],
        on_tick: Callable[[], None],
        on_fault: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._on_progress = on_progress
        self.fleet.backend.tick = on_tick
        self.fault_log.on_fault = on_fault

    def report_progress(self, phase: str, done: int, total: int) -> None:
        """Report progress to the listener of the run."""
        self._on_progress(phase, done, total)

    @traced
    def evaluate(self, step: int, frames: int = 0, enough: Enough | None = None) -> Evaluation:
        self.collector.wait_for_weights()
        return self.evaluator.evaluate_states(
            step, frames, lambda episodes: self._on_progress("eval", 0, episodes), enough
        )

    def describe_devices(self) -> str:
        calls = [worker.call(HostInterface.worker_device) for worker in self.fleet.workers]
        return describe_placement(self.fleet.assignments, self.fleet.get_all(calls))

    def progress(self, phase: str, done: int, total: int) -> tuple[str, int, int]:
        return self.fleet.describe_progress(self.spec, self.info, phase, done, total)

    def record(self, kind: str, step: int, env_steps: int, folder: Path, final: bool) -> None:
        fleet = self.fleet
        trace = self.trace
        if not trace.clock_offsets:
            for worker in fleet.workers:
                trace.clock_offsets[worker.worker_index] = clock_ahead(partial(self._read_clock, worker))
            trace.sizes = self.memory.measure_sizes()
        drained = fleet.get_from_living([worker.call(HostInterface.drain_trace) for worker in fleet.workers])
        of_living = {
            worker.worker_index: events
            for worker, events in zip(fleet.workers, drained, strict=True)
            if events is not None
        }
        trace.add_events(kind, step, env_steps, of_living)
        trace.write_file(folder, final=final)

    def time_shares(self) -> dict[str, dict[str, Any]]:
        return self.trace.role_shares()

    def notes(self) -> tuple[str, ...]:
        return (*self.info.notes, *_success_notes(self.spec), *self.compilation.notes)

    @property
    def faults(self) -> int:
        return self.fault_log.count

    def close(self) -> None:
        self.fleet.backend.close()

    def _read_clock(self, worker: Handle[HostInterface]) -> tuple[str, float]:
        return self.fleet.get(worker.call(HostInterface.read_clock))


def _success_notes(spec: Spec) -> tuple[str, ...]:
    """Return what a reader of results must know about who judges success."""
    rewards = spec.rewards
    if rewards is None:
        return ()
    subject = "success" if rewards.evaluation else "success of rollouts (not of evaluations)"
    return (
        f"{subject} is judged by reward model {rewards.type!r}, threshold {rewards.threshold:g}, not by the simulator",
    )
