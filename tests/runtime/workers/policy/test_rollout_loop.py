"""The queues of a worker's rollouts, whose calls come in separate threads."""

from __future__ import annotations

from vla_rl.core.plan import Batching, Slot
from vla_rl.runtime.placement.assignments import Assignment, LaneSlice
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


def test_tickets_and_questions_may_come_before_the_rollout_in_the_background_begins() -> None:
    """Ray runs calls of separate concurrency groups in any order."""
    loop = build_loop()
    assert not loop.wait_for_report((), True, "imagination").collected
    assert not loop.add_tickets([], "imagination")
    assert loop.queue_of("imagination") is loop.queue_of("imagination") is not loop.queue_of("action")
