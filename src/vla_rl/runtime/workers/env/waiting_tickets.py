"""Tickets that wait in a lane for a free env."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vla_rl.runtime.messages.requests import EpisodeRequest

_Queue = deque[tuple[int, EpisodeRequest]]
"""Tickets with their places in the order of arrival."""


class WaitingTickets:
    """Queue of tickets that any env may take, and of tickets of single envs' streams."""

    def __init__(self) -> None:
        self._by_task: dict[str, _Queue] = {}
        """Tickets that any env may take; no queue is empty."""
        self._of_env: dict[int, list[tuple[int, EpisodeRequest]]] = {}
        """Env (index in the run) -> tickets of its stream."""
        self._arrived = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, tickets: Iterable[EpisodeRequest]) -> None:
        for ticket in tickets:
            place = self._arrived, ticket
            if ticket.env_id is None:
                self._by_task.setdefault(ticket.state.task, deque()).append(place)
            else:
                self._of_env.setdefault(ticket.env_id, []).append(place)
            self._arrived += 1
            self._count += 1

    def take_ticket(self, env: int, loaded: str | None) -> EpisodeRequest | None:
        """Remove and return the next ticket for an env (index in the run); None: there is none. The first ticket of the
        task `loaded`, whose scene the env has loaded, comes before all others."""
        own = self._of_env.get(env, [])
        preferred = [place for place in own if place[1].state.task == loaded][:1]
        if loaded in self._by_task:
            preferred.append(self._by_task[loaded][0])
        candidates = preferred or [*own[:1], *(queue[0] for queue in self._by_task.values())]
        if not candidates:
            return None
        place = min(candidates, key=lambda candidate: candidate[0])
        self._remove_ticket(env, place)
        return place[1]

    def _remove_ticket(self, env: int, place: tuple[int, EpisodeRequest]) -> None:
        self._count -= 1
        ticket = place[1]
        if ticket.env_id is not None:
            self._of_env[env].remove(place)
            return
        queue = self._by_task[ticket.state.task]
        queue.popleft()
        if not queue:
            del self._by_task[ticket.state.task]
