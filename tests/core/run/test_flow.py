"""The scheduler on virtual time: envs that take random times, die and come back, and filters that drop groups."""

from __future__ import annotations

import heapq
from random import Random

import pytest
from attrs import asdict

from vla_rl.core.run.flow import Flow, Ledger, Ticket

SEEDS = range(40)


class World:
    """Envs play tickets; a learner takes steps. Weights are published when a step's update is over."""

    def __init__(self, flow, random, *, num_envs, update, deaths, drops):
        self.flow, self.random, self.num_envs, self.update = flow, random, num_envs, update
        self.deaths, self.drops = deaths, drops
        self.waiting, self.running, self.busy_until, self.now = [], [], None, 0.0
        self.began_at = {}
        """Ticket -> version of the weights when it (last) began."""
        self.ended, self.most, self.lag, self.per_step = [], 0, 0, []
        self.taken = []

    def run(self):
        """To the end of the flow; fails where nothing can continue."""
        flow = self.flow
        while flow.step < flow.steps:
            self.waiting += flow.issue_tickets()
            self.most = max(self.most, flow.groups_held)
            while self.waiting and len(self.running) < self.num_envs:
                ticket = self.waiting.pop(0)
                self.began_at[ticket.number] = flow.step
                length = self.random.lognormvariate(0, 1)
                heapq.heappush(self.running, (self.now + length, ticket.number))
            if self.busy_until is None and self._learn():
                continue
            ends = [t for t, _ in self.running[:1]] + [t for t in [self.busy_until] if t is not None]
            assert ends, "nothing is played, nothing is trained on, and the run is not over"
            self.now = min(ends)
            if self.busy_until is not None and self.now >= self.busy_until:
                self.busy_until = None
                self.per_step.append(len(self.taken))
                self.ended += self.taken
                self.taken = []
                flow.finish_step("trained" if flow.kept else "discarded")
            elif self.random.random() < self.deaths:
                _, number = heapq.heappop(self.running)
                self.waiting.insert(0, Ticket(number, number // flow.group_size))
            else:
                flow.record_ticket(heapq.heappop(self.running)[1])

    def _learn(self):
        """Take the available groups; -> whether something happened."""
        groups = self.flow.take_groups()
        if groups is None:
            return False
        if groups:
            size = self.flow.group_size
            for number in (g * size + i for g in groups for i in range(size)):
                self.lag = max(self.lag, self.flow.step - self.began_at[number])
            dropped = [g for g in groups if self.random.random() < self.drops]
            self.flow.keep_groups([g for g in self.flow.kept if g not in dropped])
            self.ended += dropped
            self.taken += [g for g in groups if g not in dropped]
        else:
            self.busy_until = self.now + self.update * self.random.lognormvariate(0, 1)
        return True


@pytest.mark.parametrize("seed", SEEDS)
def test_promises_hold_whatever_happens(seed):
    random = Random(seed)
    size, per_step, max_lag = random.choice([1, 2, 8]), random.choice([1, 3, 8]), random.randrange(4)
    further, drops = random.choice([0, 5]), random.choice([0.0, 0.3, 0.9])
    flow = Flow(groups_per_step=per_step, steps=12, group_size=size, max_lag=max_lag, resampled_groups=further)
    world = World(flow, random, num_envs=random.choice([1, 5, 64]), update=random.choice([0.0, 2.0, 30.0]),
                  deaths=random.choice([0.0, 0.2]), drops=drops)  # fmt: skip
    world.run()
    assert world.lag <= max_lag
    assert world.most <= (max_lag + 1) * per_step, "memory is bounded"
    assert sorted(world.ended) == list(range(flow.ledger.first)), "every group ends once, in no order but its number's"
    ledger = flow.ledger
    assert ledger.trained + ledger.filtered + ledger.discarded == ledger.first * size
    assert all(kept <= per_step for kept in world.per_step)
    if not drops:
        assert world.per_step == [per_step] * 12 and ledger.filtered == 0


def play_all(flow):
    """Issue and finish every ticket at once, and return the numbers that were issued."""
    numbers = [ticket.number for ticket in flow.issue_tickets()]
    for number in numbers:
        flow.record_ticket(number)
    return numbers


def test_without_lag_a_step_is_played_after_the_one_before():
    flow = Flow(groups_per_step=2, steps=3, group_size=2)
    assert [(t.number, t.group) for t in flow.issue_tickets()] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert flow.issue_tickets() == [] and flow.take_groups() is None
    for number in (3, 0, 1):
        flow.record_ticket(number)
    assert flow.take_groups() is None, "in order of numbers, and whole"
    flow.record_ticket(2)
    assert flow.take_groups() == [0, 1] and flow.take_groups() == []
    assert flow.issue_tickets() == [], "the weights of the step are not there yet"
    flow.finish_step()
    assert [ticket.number for ticket in flow.issue_tickets()] == [4, 5, 6, 7]


def test_lag_lets_envs_run_ahead_by_this_many_steps():
    flow = Flow(groups_per_step=2, steps=9, max_lag=1)
    assert play_all(flow) == [0, 1, 2, 3]
    flow.take_groups()
    assert flow.issue_tickets() == []
    flow.finish_step()
    assert play_all(flow) == [4, 5]


def test_filtered_groups_make_room_for_others():
    flow = Flow(groups_per_step=2, steps=9, resampled_groups=2)
    play_all(flow)
    assert flow.take_groups() == [0, 1]
    flow.keep_groups([])
    assert play_all(flow) == [2, 3]
    assert flow.take_groups() == [2, 3]
    flow.keep_groups([3])
    assert flow.take_groups() == [], "four of four are tried"
    assert flow.kept == [3]
    flow.finish_step()
    assert asdict(flow.ledger) == {"step": 1, "first": 4, "trained": 1, "filtered": 3, "discarded": 0}


def test_a_step_of_which_nothing_is_left_is_over_too():
    flow = Flow(groups_per_step=2, steps=2)
    play_all(flow)
    flow.take_groups()
    flow.keep_groups([])
    assert flow.take_groups() == []
    flow.finish_step("discarded")
    assert (flow.step, flow.ledger.filtered) == (1, 2)


def test_nothing_is_played_for_steps_that_never_come():
    flow = Flow(groups_per_step=4, steps=1, max_lag=3)
    assert play_all(flow) == [0, 1, 2, 3]


def test_what_is_ready_are_the_first_groups():
    """Also those that were played ahead, and never more than the running step wants."""
    flow = Flow(groups_per_step=3, steps=9, group_size=2, max_lag=1)
    flow.issue_tickets()
    for number, ready in ((3, []), (2, []), (8, []), (9, []), (0, []), (1, [0, 1]), (4, [0, 1]), (5, [0, 1, 2])):
        flow.record_ticket(number)
        assert flow.groups_ready == ready and (
            flow.take_groups() == [0, 1, 2] if len(ready) == 3 else flow.take_groups() is None
        )
    flow.finish_step()
    assert flow.groups_ready == []
    for number, ready in ((6, []), (7, [3, 4])):
        flow.record_ticket(number)
        assert flow.groups_ready == ready


def test_a_ticket_is_played_once():
    flow = Flow(groups_per_step=3, steps=2, max_lag=1)
    first = flow.issue_tickets()
    assert flow.tickets_needed == [0, 1, 2] and flow.tickets_running == [0, 1, 2, 3, 4, 5]
    for ticket in first:
        flow.record_ticket(ticket.number)
    assert flow.tickets_needed == flow.tickets_running == []
    with pytest.raises(ValueError, match="ticket 1 is not being collected"):
        flow.record_ticket(1)
    with pytest.raises(ValueError, match="ticket 99 is not being collected"):
        flow.record_ticket(99)


def test_a_resumed_run_issues_what_was_not_consumed_again():
    flow = Flow(groups_per_step=2, steps=9, max_lag=2)
    play_all(flow)
    flow.take_groups()
    flow.finish_step()
    flow.take_groups()  # killed before the end of the second step
    again = Flow(groups_per_step=2, steps=9, max_lag=2, ledger=Ledger(**asdict(flow.ledger)))
    assert again.step == 1 and play_all(again) == [2, 3, 4, 5, 6, 7]
