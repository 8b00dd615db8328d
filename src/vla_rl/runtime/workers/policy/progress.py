"""How far a rollout or an evaluation is, while it goes on: counted where policies act, asked by the driver."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import frozen

from vla_rl.runtime.messages.requests import Request
from vla_rl.toolkit.waiting import Work


@frozen
class Count:
    """Of one policy's worker, or the sum of several, since it began to play."""

    tickets: int = 0
    """That were played to their end."""
    steps: int = 0
    """Chunk steps of those that are being played."""
    solved: int = 0
    """Demonstrations, by the scripted expert."""
    works: tuple[Work, ...] = ()
    """What else goes on there, and takes long."""

    def __add__(self, other: Count) -> Count:
        return Count(
            self.tickets + other.tickets,
            self.steps + other.steps,
            self.solved + other.solved,
            self.works + other.works,
        )


class Progress:
    """Counts what a policy is asked. Written by the thread that plays, read by others."""

    def __init__(self) -> None:
        self._tickets = 0
        self._steps: dict[int, int] = {}
        """Lane -> chunk steps of what its rows play."""

    def begin(self) -> None:
        """A rollout, or an evaluation, begins."""
        self._tickets, self._steps = 0, {}

    def note(self, lane: int, request: Request) -> None:
        self._tickets += len(request.finished)
        self._steps[lane] = request.steps

    def count(self) -> Count:
        return Count(self._tickets, sum(tuple(self._steps.values())))


class Glances:
    """What busy workers have played, asked without waiting for their answers."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._asked: dict[Any, Any] = {}
        """Actor -> reference to its next answer."""
        self._known: dict[Any, Count] = {}

    def count(self, actors: Iterable[Any]) -> Count:
        """The sum of what these have said; asks again."""
        total = Count()
        for actor in actors:
            asked = self._asked.get(actor)
            if asked is not None and self._ray.wait([asked], timeout=0)[0]:
                self._known[actor] = self._answer(asked)
                asked = None
            self._asked[actor] = actor.played.remote() if asked is None else asked
            total += self._known.get(actor, Count())
        return total

    def silent(self, actors: Iterable[Any]) -> int:
        """How many of these have not answered yet."""
        return sum(actor not in self._known for actor in actors)

    def forget(self) -> None:
        """Another phase begins."""
        self._asked.clear()
        self._known.clear()

    def _answer(self, reference: Any) -> Count:
        try:
            found: Count = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:  # whoever waits for its work says so
            return Count()
        return found
