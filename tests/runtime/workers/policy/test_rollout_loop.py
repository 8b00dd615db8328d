"""The queues of a worker's rollouts, whose calls come in separate threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from vla_rl.core.plan import Batching, Slot
from vla_rl.core.types import ResetState
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.placement.assignments import Assignment, LaneSlice
from vla_rl.runtime.scheduling.batching import Lane
from vla_rl.runtime.workers.policy.rollout_loop import RolloutLoop

LANES = (LaneSlice(index=0, first_env=0, num_envs=2),)
ALONE = Assignment(
    index=0,
    slot=Slot(roles=("sim", "policy")),
    lanes=LANES,
    served=LANES,
    homes=(0,),
    batching=Batching(),
    rank=-1,
    world=0,
)


def build_loop() -> RolloutLoop:
    """A loop that rolls nothing out."""
    unused = None
    return RolloutLoop(ALONE, unused, unused, unused, frames=False, idle=lambda: None, stop_requested=lambda: False)


def request_for(number: int) -> EpisodeRequest:
    return EpisodeRequest(state=ResetState(id=0, task="task"), number=number)


def test_tickets_may_come_before_their_rollout_begins() -> None:
    """Ray runs calls of separate concurrency groups in any order."""
    loop = build_loop()
    assert loop.add_tickets([[request_for(1)]], "imagination", 1)
    queue = loop.queue_of("imagination")
    assert queue is loop.queue_of("imagination") is not loop.queue_of("action")
    queue.begin_rollout([[request_for(0)]])
    taken = queue.take_tickets(Lane(slice=LANES[0], sim=lambda *_: None), 2, 0, 0)
    assert [ticket.number for ticket in taken] == [0, 1]
    assert queue.end_if_empty()
    assert not loop.add_tickets([[request_for(2)]], "imagination", 1)


def test_a_question_waits_for_the_rollout_that_it_names() -> None:
    loop = build_loop()
    with ThreadPoolExecutor(1) as thread:
        report = thread.submit(loop.wait_for_report, (), True, "action", 1)
        assert wait([report], timeout=0.2).not_done
        queue = loop.queue_of("action")
        queue.begin_rollout([])
        assert wait([report], timeout=0.2).not_done
        queue.end_rollout()
        assert not report.result(timeout=10).collected
    assert not loop.wait_for_report((), True, "action", 1).collected
