"""The queue of a lane gives what a search through all waiting tickets would give."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.core.types import ResetState
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.workers.env.waiting_tickets import WaitingTickets

TASKS = ("a", "b", "c")


def searched(waiting: list[EpisodeRequest], env: int, loaded: str | None) -> EpisodeRequest | None:
    fitting = [ticket for ticket in waiting if ticket.env_id in (None, env)]
    of_task = [ticket for ticket in fitting if ticket.state.task == loaded]
    return next(iter(of_task or fitting), None)


@settings(max_examples=60, deadline=None)
@given(
    tickets=st.lists(st.tuples(st.sampled_from(TASKS), st.sampled_from((None, None, 0, 1))), max_size=12),
    asks=st.lists(st.tuples(st.integers(0, 1), st.sampled_from((None, *TASKS))), max_size=20),
    late=st.integers(0, 6),
)
def test_the_order_is_that_of_a_search(tickets, asks, late):
    requests = [
        EpisodeRequest(state=ResetState(id=i, task=task), number=i, env_id=env) for i, (task, env) in enumerate(tickets)
    ]
    waiting, queue = requests[late:], WaitingTickets()
    queue.extend(requests[late:])
    for ask, (env, loaded) in enumerate(asks):
        if ask == 3:
            waiting += requests[:late]
            queue.extend(requests[:late])
        expected = searched(waiting, env, loaded)
        assert queue.take_ticket(env, loaded) is expected
        if expected is not None:
            waiting = [ticket for ticket in waiting if ticket is not expected]
        assert len(queue) == len(waiting)
