"""Task sampling weighted by failures: a task is drawn more often the more often it failed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from vla_rl.core.errors import CheckpointError
from vla_rl.core.types import Episode
from vla_rl.toolkit.json_files import read_record


class TaskWeighting:
    """Dynamic weighted resampling (AcceRL, eq. 11): a task's weight is the number of failures among its last `window`
    outcomes, over all workers, plus `smoothing`.

    Outcomes of a rollout count from the next step on. So a step that is repeated, after a run was stopped in the middle
    of it, finds the weights that it had.
    """

    def __init__(self, tasks: Iterable[str], window: int, smoothing: float, ahead: int = 0):
        """Create the weights. `ahead`: training steps for which tickets are issued in advance
        (`asynchrony.max_lag`)."""
        self.smoothing = smoothing
        self.failed: dict[str, deque[bool]] = {task: deque(maxlen=window) for task in dict.fromkeys(tasks)}
        self.newest: tuple[int, list[tuple[str, bool]]] = (0, [])
        self.issued: deque[tuple[int, dict[str, float]]] = deque(maxlen=ahead + 2)
        """Weights in use from each group on, (first group, weights)."""
        self.next = 0
        """First group that was never issued."""

    def group_weights(self, step: int, group: int) -> dict[str, float]:
        """Return task -> weight for a group that is issued while `step` runs. A group that is issued again gets the
        weights that it had."""
        if group >= self.next:
            self.next = group + 1
            current = self._current_weights(step)
            if not self.issued or current != self.issued[-1][1]:
                self.issued.append((group, current))
        return next(weights for first, weights in reversed(self.issued) if first <= group)

    def _current_weights(self, step: int) -> dict[str, float]:
        recorded, outcomes = self.newest
        if recorded < step:
            for task, failed in outcomes:
                self.failed[task].append(failed)
            self.newest = (step, [])
        return {task: sum(failed) + self.smoothing for task, failed in self.failed.items()}

    def record_step_outcomes(self, step: int, episodes: Iterable[Episode]) -> None:
        """Record the outcomes of `step`'s rollout, in the order of the tickets, whatever the placement."""
        ordered = sorted(episodes, key=lambda e: (e.number, e.episode))
        self.newest = (step, [(e.task, not e.success_once) for e in ordered])

    def save(self, file: Path) -> None:
        failed = {task: list(outcomes) for task, outcomes in self.failed.items()}
        state = {"failed": failed, "newest": self.newest, "issued": list(self.issued), "next": self.next}
        file.write_text(json.dumps(state), encoding="utf-8")

    def load(self, file: Path) -> None:
        """Restore what `save` wrote; without a file (a run that sampled uniformly) the outcomes stay empty."""
        if not file.is_file():
            return
        state = read_record(file, CheckpointError).data
        for task, failed in self.failed.items():
            failed.extend(state["failed"].get(task, ()))
        self.issued.extend((first, weights) for first, weights in state["issued"])
        self.next = state["next"]
        step, outcomes = state["newest"]
        self.newest = (step, [(task, failed) for task, failed in outcomes if task in self.failed])
