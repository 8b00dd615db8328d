"""What the driver asks of whatever hosts the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from vla_rl.core.errors import UserError
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.comm.remote import Door
from vla_rl.runtime.comm.status_line import StatusLine
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.waiting import Work, summed

TICK_S = 0.5
"""How often, while the driver waits, it is asked whether the run has to stop, whether Ray lives and how far it is."""

T = TypeVar("T")


class Ref(Generic[T]):
    """For type checkers: a T that may still be on its way. What it really is, a backend knows."""


class CallHung(UserError):
    """A call outlasted `runtime.deadline_s`."""


class Backend(ABC):
    """Calls to workers by index."""

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        """When a stop is asked for, workers leave what they play (StopRequested)."""
        self._line = StatusLine()
        self._tick: Callable[[], None] = self._show_start

    @property
    def tick(self) -> Callable[[], None]:
        """Is called about every `TICK_S` while results are waited for; until it is set, says how the start goes."""
        return self._tick

    @tick.setter
    def tick(self, tick: Callable[[], None]) -> None:
        self._line.clear()
        self._tick = tick

    def _show_start(self) -> None:
        work = summed(self.starting())
        if work is not None:
            self._line.show(work.title, work.done, work.total)

    @abstractmethod
    def starting(self) -> tuple[Work, ...]:
        """What goes on in all workers, and takes long."""

    @abstractmethod
    def cluster(self) -> Cluster: ...

    @abstractmethod
    def start(self, spec: Spec, assignments: Sequence[Assignment]) -> None: ...

    @abstractmethod
    def call(self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1, door: Door = "call") -> Any:
        """-> a reference, or a list of `returns` references. Arguments may be references."""

    def introduce(self, worker: int, others: Sequence[int]) -> Ref[None]:
        """Let a worker call others."""
        raise AssertionError("one process has no others")

    @abstractmethod
    def get(self, reference: Ref[T]) -> T:
        """Wait for a result; raises what the call raised, WorkerDied, or CallHung."""

    def get_all(self, references: Sequence[Ref[T]]) -> list[T]:
        """Wait for all, in whatever order they come, so that the first error is raised even if others never return."""
        left = list(references)
        while left:
            for reference in self.ready(left):
                left.remove(reference)
                self.get(reference)
        return [self.get(reference) for reference in references]

    @abstractmethod
    def ready(self, references: Sequence[Ref[T]]) -> list[Ref[T]]:
        """Wait until at least one is there, -> those that are."""

    @abstractmethod
    def played(self, workers: Sequence[int]) -> RolloutProgress:
        """How far these are with what they play, as far as they have said; does not wait."""

    def dead(self) -> list[int]:
        """Workers whose process ended."""
        return []

    def revive(self, workers: Sequence[int]) -> None:
        """Start dead workers anew, on their device, or on a node that came back under the name of a lost one."""
        assert not workers, "none of these die"

    @abstractmethod
    def close(self) -> None:
        """End all workers; may be called twice, also after an error."""
