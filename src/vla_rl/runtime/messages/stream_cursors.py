"""Positions of the persistent env streams of auto_reset, as the driver and the policy's worker know them."""

from __future__ import annotations

from attrs import define, evolve, field

from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest


@define
class StreamCursors:
    """Cursor of each stream: the position after its last finished ticket that this process has seen."""

    last: dict[int, tuple[int, EpisodeRequest]] = field(factory=dict)
    """Env (index in the run) -> its last finished ticket, and the request from which its stream continues."""

    def note_ticket(self, ticket: EnvTrajectory) -> None:
        if ticket.after is not None:
            assert ticket.after.env_id is not None
            self.last[ticket.after.env_id] = ticket.number, ticket.after

    def with_position(self, start: EpisodeRequest) -> EpisodeRequest:
        """Return the ticket with the position from which it continues, if that is known; otherwise the ticket
        itself.
        """
        if start.env_id is None or start.actions is not None:
            return start
        number, after = self.last.get(start.env_id, (None, start))
        if number != start.follows:
            return start
        return evolve(
            start, state=after.state, episode=after.episode, actions=after.actions, return_so_far=after.return_so_far
        )
