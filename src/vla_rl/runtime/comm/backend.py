"""Interface of what hosts the workers: this process, or Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from vla_rl.core.errors import UserError
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.comm.remote import ConcurrencyGroup
from vla_rl.runtime.comm.status_line import StatusLine
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.waiting import Work, merge_works

TICK_S = 0.5
"""Seconds between ticks of a waiting driver: it looks for stop requests and whether Ray lives, and shows progress."""

T = TypeVar("T")


class Ref(Generic[T]):
    """Type for static checkers: a T that may still be on its way. Each backend has its own kind of reference."""


class CallHung(UserError):
    """A call outlasted `runtime.deadline_s`."""


class Backend(ABC):
    """Calls to workers by index. Subclasses run workers in this process or as Ray actors."""

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        """Stop requests; workers then end their rollouts early, with StopRequested."""
        self._line = StatusLine()
        self._tick: Callable[[], None] = self._show_start

    @property
    def tick(self) -> Callable[[], None]:
        """Called about every `TICK_S` seconds while waiting for results. The default shows the start's progress."""
        return self._tick

    @tick.setter
    def tick(self, tick: Callable[[], None]) -> None:
        self._line.clear()
        self._tick = tick

    def _show_start(self) -> None:
        work = merge_works(self.starting_work())
        if work is not None:
            self._line.show_progress(work.title, work.done, work.total)

    @abstractmethod
    def starting_work(self) -> tuple[Work, ...]:
        """Return the long-running work of all workers."""

    @abstractmethod
    def cluster_resources(self) -> Cluster: ...

    @abstractmethod
    def check_store(self, size: int) -> None:
        """Raise UserError where results that are passed on, of this many bytes at once, have no room on the way."""

    @abstractmethod
    def launch_workers(self, spec: Spec, assignments: Sequence[Assignment]) -> None: ...

    @abstractmethod
    def call_worker(
        self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1, group: ConcurrencyGroup = "call"
    ) -> Any:
        """Call a method of a role on a worker without waiting; its error comes with the result. Return a reference, or
        a list of `returns` references. Arguments may be references. `group`: what `@remote` declares of the method."""

    def connect_worker(self, worker: int, others: Sequence[int]) -> Ref[None]:
        """Connect a worker to others, so that it can call them."""
        raise AssertionError("one process has no others")

    @abstractmethod
    def get(self, reference: Ref[T]) -> T:
        """Wait for a result. Raises what the call raised, WorkerDied, or CallHung."""

    def get_all(self, references: Sequence[Ref[T]]) -> list[T]:
        """Wait for all results as they arrive, so that the first error is raised even if others never return."""
        left = list(references)
        while left:
            for reference in self.wait_for_any(left):
                left.remove(reference)
                self.get(reference)
        return [self.get(reference) for reference in references]

    @abstractmethod
    def wait_for_any(self, references: Sequence[Ref[T]]) -> list[Ref[T]]:
        """Wait until at least one result is there. Return the references of those that are."""

    @abstractmethod
    def read_progress(self, workers: Sequence[int]) -> RolloutProgress:
        """Return the last known progress of these workers; does not wait."""

    def dead_workers(self) -> list[int]:
        """Return the workers whose process has ended."""
        return []

    def revive_workers(self, workers: Sequence[int]) -> None:
        """Start dead workers again, on their device, or on a node that came back under the name of a lost one."""
        assert not workers, "none of these die"

    @abstractmethod
    def close(self) -> None:
        """End all workers; may be called twice, also after an error."""
