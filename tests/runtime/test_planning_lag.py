"""Running ahead, simulated: what a lag reaches of the bound, and what the flow promises."""

from __future__ import annotations

from heapq import heappop, heappush
from math import log, sqrt
from random import Random

import pytest
from attrs import evolve

from vla_rl.core.plan import Plan, Slot
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.assignments import assign
from vla_rl.runtime.planning.forecast import forecast, overlap
from vla_rl.runtime.planning.part import part_of
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.runtime.planning.simulate import Simulation

ROWS, MEAN, CHUNK = 64, 60, 0.01
PLAN = Plan(slots=tuple(Slot(roles=(role,)) for role in ("sim", "policy", "learner")))
LAGS = range(4)


def lengths(cv):
    """Chunk steps of tickets, lognormal, of mean `MEAN`."""
    if not cv:
        return (MEAN,)
    random, sigma = Random(5), sqrt(log(1 + cv**2))
    drawn = [random.lognormvariate(0.0, sigma) for _ in range(4000)]
    return tuple(max(1, round(MEAN * x * len(drawn) / sum(drawn))) for x in drawn)


def job(cv, tickets, update):
    """A simulator of 64 rows in parallel, and an update of so many times the seconds that rows need for a step's
    tickets. -> (profile, those seconds)."""
    steps = lengths(cv)
    seconds = sum(steps) / len(steps) * tickets / ROWS * CHUNK
    sim = Cost(seconds=CHUNK, rows=ROWS, fixed=1.0)
    learner = Cost(seconds=update * seconds)
    return Profile(chunk_steps=steps, sim=sim, policy=Cost(seconds=0.0), learner=learner, message=0.0), seconds


def shares(cv, tickets, update):
    """Of the bound that each lag reaches."""
    profile, seconds = job(cv, tickets, update)
    there = assign(PLAN, ROWS, one_process=False)
    found = [forecast(PLAN, there, profile, tickets=tickets, chunk=1, max_lag=lag) for lag in LAGS]
    assert all(expected.lag <= lag for lag, expected in enumerate(found))
    return [max(seconds, update * seconds) / expected.iteration for expected in found]


@pytest.mark.parametrize(
    ("tickets", "cv", "update", "published"),
    [
        (64, 0.0, 1.0, (0.50, 1.00, 1.00, 1.00)),
        (64, 0.3, 1.0, (0.35, 0.67, 0.91, 1.00)),
        (64, 0.3, 0.5, (0.42, 0.77, 0.99, 1.00)),
        (64, 0.3, 2.0, (0.52, 0.98, 1.00, 1.00)),
        (256, 0.3, 1.0, (0.44, 0.89, 1.00, 1.00)),
        (256, 0.3, 0.5, (0.57, 1.00, 1.00, 1.00)),
        (256, 0.6, 1.0, (0.39, 0.77, 1.00, 1.00)),
    ],
)
def test_what_a_lag_reaches(tickets, cv, update, published):
    """An independent simulation of lognormal tickets on 64 lanes; seconds of an update by those of a rollout."""
    assert shares(cv, tickets, update) == pytest.approx(published, abs=0.035)


def rules(cv, tickets, update, lag, steps=400):
    """Seconds of a step by the rules alone: any row plays the next ticket once it is free and step s - lag - 1 is over;
    a step is trained on when all its tickets are played."""
    random, drawn = Random(7), lengths(cv)
    rows, over, now = [0.0] * ROWS, [], 0.0
    for step in range(steps):
        admitted = over[step - lag - 1] if step > lag else 0.0
        for _ in range(tickets):
            end = max(heappop(rows), admitted) + random.choice(drawn) * CHUNK
            heappush(rows, end)
            now = max(now, end)
        over.append(now := now + update)
    return (over[-1] - over[49]) / (steps - 50)


@pytest.mark.parametrize(("tickets", "cv"), [(64, 0.6), (64, 1.0), (256, 1.0)])
def test_long_tails_by_the_rules_alone(tickets, cv):
    _, seconds = job(cv, tickets, 1.0)
    by_rules = [seconds / rules(cv, tickets, seconds, lag) for lag in LAGS]
    assert shares(cv, tickets, 1.0) == pytest.approx(by_rules, abs=0.04)


@pytest.mark.parametrize("lag", LAGS)
def test_lag_and_memory_are_bounded(lag):
    profile, _ = job(1.0, ROWS, 1.0)
    part = part_of(PLAN, assign(PLAN, ROWS, one_process=False), profile, ROWS, moving=0.0)
    steps = Simulation(part, profile, lag).run(20)
    assert max(step.lag for step in steps) == lag
    assert steps[-1].held == (lag + 1) * ROWS
