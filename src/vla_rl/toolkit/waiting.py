"""What people wait for. Long work says here how far it is, whichever process it is done in; whoever waits for that
process asks. Work that is over within `PATIENCE_S` is never shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from attrs import evolve, frozen

PATIENCE_S = 1.5


@frozen(kw_only=True)
class Work:
    """Something that goes on."""

    what: str
    """In words, such as "starting rows"."""
    done: int
    total: int
    """Of what is counted; 0: not known."""
    about: str = ""
    """Which, such as the tasks of these rows."""
    since: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.what}: {self.about}" if self.about else self.what


_works: dict[int, Work] = {}
_listeners: list[Callable[[], None]] = []


@contextmanager
def waiting(what: str, total: int = 0, about: str = "") -> Iterator[Callable[[int], None]]:
    """For work that may take long. -> a function that is told how much of `total` is done."""
    work = Work(what=what, done=0, total=total, about=about, since=monotonic())
    key = id(work)
    _works[key] = work

    def note(done: int) -> None:
        _works[key] = evolve(work, done=done)
        for listener in tuple(_listeners):
            listener()

    try:
        yield note
    finally:
        del _works[key]


def works_now() -> tuple[Work, ...]:
    """What goes on in this process for longer than `PATIENCE_S`, the oldest first."""
    begun = monotonic() - PATIENCE_S
    return tuple(sorted((work for work in tuple(_works.values()) if work.since <= begun), key=lambda work: work.since))


def summed(works: Iterable[Work]) -> Work | None:
    """Those that do the same as the first, in whichever process, as one."""
    first, *others = tuple(works) or (None,)
    if first is None:
        return None
    same = [first, *(work for work in others if work is not None and work.what == first.what)]
    return evolve(first, done=sum(work.done for work in same), total=sum(work.total for work in same))


@contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener`, in whatever thread works, each time that work of this process has advanced."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
