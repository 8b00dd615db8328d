"""Progress of long work. Code that takes long reports its progress here, in whichever process it runs; whoever waits
for that process asks for it. Work that ends within `PATIENCE_S` is never shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from attrs import evolve, frozen

PATIENCE_S = 1.5


@frozen(kw_only=True)
class Work:
    """A piece of work in progress."""

    what: str
    """Name of the work, such as "starting envs"."""
    done: int
    total: int
    """Number of items; 0: unknown."""
    about: str = ""
    """Further description, such as the tasks of these envs."""
    since: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.what}: {self.about}" if self.about else self.what


_works: dict[int, Work] = {}
_listeners: list[Callable[[], None]] = []


@contextmanager
def register_work(what: str, total: int = 0, about: str = "") -> Iterator[Callable[[int], None]]:
    """Register work that may take long, and yield a function to report how much of `total` is done."""
    work = Work(what=what, done=0, total=total, about=about, since=monotonic())
    key = id(work)
    _works[key] = work

    def note_progress(done: int) -> None:
        _works[key] = evolve(work, done=done)
        for listener in tuple(_listeners):
            listener()

    try:
        yield note_progress
    finally:
        del _works[key]


def list_running_work() -> tuple[Work, ...]:
    """Return the work of this process that has lasted longer than `PATIENCE_S`, oldest first."""
    begun = monotonic() - PATIENCE_S
    return tuple(sorted((work for work in tuple(_works.values()) if work.since <= begun), key=lambda work: work.since))


def merge_works(works: Iterable[Work]) -> Work | None:
    """Merge all work of the same kind as the first, from any process, into one."""
    first, *others = tuple(works) or (None,)
    if first is None:
        return None
    same = [first, *(work for work in others if work is not None and work.what == first.what)]
    return evolve(first, done=sum(work.done for work in same), total=sum(work.total for work in same))


@contextmanager
def listen_to_work(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener`, in whatever thread works, each time that work of this process has advanced."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
