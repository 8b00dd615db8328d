"""Requests for episodes: the reset state, the version of the weights and the previous ticket from which each ticket
starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from vla_rl.core.reset_states import draw_state
from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Episode, Requirements, ResetState
from vla_rl.runtime.driver.recordings import RecordingSchedule
from vla_rl.runtime.driver.stream_cursors import EnvStreams
from vla_rl.runtime.driver.task_weights import TaskWeighting
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest


class EpisodeRequests:
    """Turns tickets into episode requests."""

    def __init__(self, spec: Spec, states: Sequence[ResetState], needs: Requirements):
        """Create the requests' source. `needs`: requirements of the algorithm."""
        self.spec, self.states, self.record = spec, states, needs.frames
        self.shape = RunShape.of(spec)
        self.streams, self.marks = EnvStreams(), RecordingSchedule(spec)
        self.windows: TaskWeighting | None = None
        """Outcomes of each task, for `rollout.task_sampling: {type: weighted}`; None otherwise."""
        sampling = spec.rollout.task_sampling
        if sampling.type == "weighted":
            tasks = [state.task for state in states]
            self.windows = TaskWeighting(tasks, sampling.window, sampling.smoothing, self.shape.max_lag)

    def of(self, ticket: Ticket, step: int, version: int) -> EpisodeRequest:
        """Return the request for a ticket that was issued while `step` ran and `version` was the newest."""
        spec, shape = self.spec, self.shape
        weights = self.windows.weights(step, ticket.group) if self.windows else None
        # Number of training steps before the ticket's own.
        before = ticket.group // shape.groups_per_step if shape.overlaps else step - 1
        pinned = max(0, before - shape.pinned_lag) if shape.pinned_lag else -1
        if spec.rollout.auto_reset == "off":
            state = draw_state(self.states, spec.seed, ticket.group, weights=weights)
            start = EpisodeRequest(state=state, number=ticket.number, record=self.record, version=pinned, least=version)
            return evolve(start, recorded=self.marks.next(before + 1))
        row = ticket.number % shape.envs
        state = draw_state(self.states, spec.seed, row // shape.group_size, weights=weights)
        start = EpisodeRequest(
            state=state, number=ticket.number, env_id=row, weights=weights, version=pinned, least=version
        )
        return self.streams.next(start)

    def note(self, step: int, episodes: Sequence[Episode], last: int) -> dict[str, float]:
        """Take note of the outcomes of `step`'s rollout, whose last ticket is `last`. Return metrics."""
        if self.windows is None:
            return {}
        self.windows.record(step, episodes)
        weights = self.windows.weights(step, last // self.shape.group_size)
        return {f"sampling/weight/{task}": weight for task, weight in weights.items()}

    def consume(self, tickets: Sequence[EnvTrajectory]) -> None:
        """Take note that a step has trained on these tickets, in the order of their numbers."""
        for ticket in tickets:
            self.streams.consume(ticket)

    def save(self, folder: Path) -> None:
        self.streams.save(folder / "streams.npz")
        if self.windows:
            self.windows.save(folder / "tasks.json")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.streams.load(folder / "streams.npz", {state.id: state for state in self.states})
        if self.windows:
            self.windows.load(folder / "tasks.json")
