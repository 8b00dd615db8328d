"""Progress of busy workers, asked without waiting for their answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vla_rl.runtime.messages.reports import RolloutProgress


class ProgressPolls:
    """What busy workers have played, asked without waiting for their answers."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._asked: dict[Any, Any] = {}
        """Actor -> reference to its next answer."""
        self._known: dict[Any, RolloutProgress] = {}

    def count(self, actors: Iterable[Any]) -> RolloutProgress:
        """The sum of what these have said; asks again."""
        total = RolloutProgress()
        for actor in actors:
            asked = self._asked.get(actor)
            if asked is not None and self._ray.wait([asked], timeout=0)[0]:
                self._known[actor] = self._answer(asked)
                asked = None
            self._asked[actor] = actor.played.remote() if asked is None else asked
            total += self._known.get(actor, RolloutProgress())
        return total

    def silent(self, actors: Iterable[Any]) -> int:
        """How many of these have not answered yet."""
        return sum(actor not in self._known for actor in actors)

    def forget(self) -> None:
        """Another phase begins."""
        self._asked.clear()
        self._known.clear()

    def _answer(self, reference: Any) -> RolloutProgress:
        try:
            found: RolloutProgress = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:  # whoever waits for its work says so
            return RolloutProgress()
        return found
