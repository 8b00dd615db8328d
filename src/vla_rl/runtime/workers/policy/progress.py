"""How far a rollout or an evaluation is, while it goes on: counted where policies act, asked by the driver."""

from __future__ import annotations

from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.messages.requests import StepRequest


class ProgressCounter:
    """Counts what a policy is asked. Written by the thread that plays, read by others."""

    def __init__(self) -> None:
        self._tickets = 0
        self._steps: dict[int, int] = {}
        """Lane -> chunk steps of what its rows play."""

    def begin(self) -> None:
        """A rollout, or an evaluation, begins."""
        self._tickets, self._steps = 0, {}

    def note(self, lane: int, request: StepRequest) -> None:
        self._tickets += len(request.finished)
        self._steps[lane] = request.steps

    def count(self) -> RolloutProgress:
        return RolloutProgress(self._tickets, sum(tuple(self._steps.values())))
