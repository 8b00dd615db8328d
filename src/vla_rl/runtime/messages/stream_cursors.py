"""Where the persistent env streams of auto_reset stand, as the driver and the worker of the policy know it."""

from __future__ import annotations

from attrs import define, evolve, field

from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest


@define
class StreamCursors:
    """Where streams stand, as far as one knows."""

    last: dict[int, tuple[int, EpisodeRequest]] = field(factory=dict)
    """Row -> its last ticket that was played, and where that left the stream."""

    def note(self, ticket: EnvTrajectory) -> None:
        if ticket.after is not None:
            assert ticket.after.row is not None
            self.last[ticket.after.row] = ticket.number, ticket.after

    def placed(self, start: EpisodeRequest) -> EpisodeRequest:
        """The ticket with what it goes on from, if that is known."""
        if start.row is None or start.actions is not None:
            return start
        number, after = self.last.get(start.row, (None, start))
        if number != start.follows:
            return start
        return evolve(start, state=after.state, episode=after.episode, actions=after.actions, paid=after.paid)
