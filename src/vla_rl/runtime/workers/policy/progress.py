"""Progress of a rollout or an evaluation: counted where policies act, asked for by the driver."""

from __future__ import annotations

from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.messages.requests import StepRequest


class ProgressCounter:
    """Counter of finished tickets and running chunk steps. One thread writes it, others read it; it needs no lock,
    since readers only sum plain integers.
    """

    def __init__(self) -> None:
        self._tickets = 0
        self._steps: dict[int, int] = {}
        """Lane -> chunk steps of its running tickets."""

    def reset_counts(self) -> None:
        """Reset the counts, as a rollout or an evaluation begins."""
        self._tickets = 0
        self._steps = {}

    def note_request(self, lane: int, request: StepRequest) -> None:
        self._tickets += len(request.finished)
        self._steps[lane] = request.steps

    def current_progress(self) -> RolloutProgress:
        return RolloutProgress(self._tickets, sum(tuple(self._steps.values())))
