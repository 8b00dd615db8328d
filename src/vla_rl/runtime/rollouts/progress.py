"""How far a rollout or an evaluation is, while it goes on: counted where policies act, asked by the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field, frozen


@frozen
class Count:
    """Of one policy's worker, or the sum of several."""

    rounds: int = 0
    """Lanes that were played to their end, each as often as it was."""
    steps: int = 0
    """Chunk steps of the lanes that are being played."""
    ended: int = 0
    """Rows that ended in the lanes' present round."""

    def __add__(self, other: Count) -> Count:
        return Count(self.rounds + other.rounds, self.steps + other.steps, self.ended + other.ended)


@define
class Played:
    """Counts what a policy is asked. Written by the thread that plays, read by others."""

    _rounds: int = 0
    _steps: dict[int, int] = field(factory=dict)
    _rows: dict[int, tuple[int, int]] = field(factory=dict)
    """Lane -> rows at the start of the round, rows that still act."""

    def begin(self) -> None:
        """A rollout, or a round of an evaluation, begins."""
        self._rounds, self._steps, self._rows = 0, {}, {}

    def watching(self, policy: Callable[..., Any]) -> Callable[..., Any]:
        """The policy of one round, whose requests are counted."""
        self._steps, self._rows = {}, {}

        def call(method: str, mode: Any, lanes: Sequence[int], *requests: Any) -> Any:
            for lane, request in zip(lanes, requests, strict=True):
                self._note(lane, len(request.rows), request.done)
            return policy(method, mode, lanes, *requests)

        return call

    def _note(self, lane: int, rows: int, done: bool) -> None:
        first, _ = self._rows.get(lane, (rows, rows))
        if done and first:
            self._rounds += 1
            self._steps.pop(lane, None)
        elif not done:
            self._steps[lane] = self._steps.get(lane, -1) + 1
        self._rows[lane] = (first, rows)

    def count(self) -> Count:
        rows = tuple(self._rows.values())
        return Count(self._rounds, sum(tuple(self._steps.values())), sum(first - left for first, left in rows))


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
