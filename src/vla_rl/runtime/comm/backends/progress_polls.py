"""Progress of busy workers, asked for without waiting for their answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vla_rl.runtime.comm.backends.ray_errors import has_died, is_unreachable
from vla_rl.runtime.messages.reports import RolloutProgress


class ProgressPolls:
    """Polls the progress of busy workers and keeps the last answer of each."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._pending: dict[Any, Any] = {}
        """Actor -> reference to its next answer."""
        self._known: dict[Any, RolloutProgress] = {}

    def poll_actors(self, actors: Iterable[Any]) -> RolloutProgress:
        """Return the sum of the last answers of these actors, and ask again."""
        total = RolloutProgress()
        for actor in actors:
            pending = self._pending.get(actor)
            if pending is not None and self._ray.wait([pending], timeout=0)[0]:
                self._known[actor] = self._read_answer(pending)
                pending = None
            self._pending[actor] = actor.progress.remote() if pending is None else pending
            total += self._known.get(actor, RolloutProgress())
        return total

    def count_started(self, actors: Iterable[Any]) -> int:
        """Return how many of these actors have answered."""
        return sum(actor in self._known for actor in actors)

    def _read_answer(self, reference: Any) -> RolloutProgress:
        try:
            progress: RolloutProgress = self._ray.get(reference)
        except self._ray.exceptions.RayError as exc:
            if not (has_died(exc) or is_unreachable(exc)):
                raise
            return RolloutProgress()  # the driver learns of it when it waits for a result
        return progress
