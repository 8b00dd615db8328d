"""The rule by which `auto` chooses, with numbers worked by hand, and what it makes of a choice."""

from __future__ import annotations

import pytest
from attrs import evolve

from vla_rl.core.plan import Cluster, DoesNotFit, Job, Measured, MeasureFirst
from vla_rl.plugins.placement.auto import AutoConfig
from vla_rl.plugins.placement.auto.choice import choices
from vla_rl.plugins.placement.auto.impl import Auto

EVEN = Measured(rows=16, sim=0.1, policy=0.1, learner=0.0, chunk_steps=32)
GPUS2 = Cluster(cpus=16, gpus=2, memory=2**37)
JOB = Job(num_envs=16, group_size=4, env="sim", measured=EVEN)


def seconds(measured, rows, devices):
    return {(c.together, c.sim, c.policy, c.learner, c.stages): c.seconds for c in choices(measured, rows, devices)}


def test_the_seconds_of_each_split():
    found = seconds(EVEN, 16, 2)
    assert found[True, 2, 2, 2, 1] == pytest.approx(32 * (0.05 + 0.05))
    assert found[False, 1, 1, 2, 1] == pytest.approx(32 * 0.2)
    assert found[False, 1, 1, 2, 2] == pytest.approx(32 * 0.1 + 0.05)
    assert found[False, 1, 1, 2, 4] == pytest.approx(32 * 0.1 + 0.025)


def test_training_is_shared_by_the_learners():
    found = seconds(evolve(EVEN, learner=0.3), 16, 3)
    assert found[False, 1, 1, 1, 1] == pytest.approx(32 * (0.2 + 0.3))
    assert found[False, 1, 2, 3, 2] == pytest.approx(32 * (0.1 + 0.1) + 0.025)


def test_what_takes_longer_gets_more_devices():
    slow_policy = evolve(EVEN, sim=0.02, policy=0.14)
    pipeline = [c for c in choices(slow_policy, 64, 8) if c.stages == 4]
    assert (pipeline[0].sim, pipeline[0].policy) == (2, 6)  # max(0.02/2, 0.14/6) is least: 0.023 s, 4 times the rows


def test_of_equals_the_simpler_one_is_first():
    assert choices(EVEN, 16, 1)[0].together
    assert choices(EVEN, 16, 2)[0].together  # 3.2 s, against 3.225 s of four lanes


def test_it_plans_what_the_rule_says():
    plan = Auto(AutoConfig()).plan(GPUS2, JOB)
    assert [slot.roles for slot in plan.slots] == [("sim", "policy", "learner")] * 2
    odd = Auto(AutoConfig()).plan(GPUS2, evolve(JOB, num_envs=15))  # 15 rows have no two halves
    assert [slot.roles for slot in odd.slots] == [("sim", "learner"), ("policy", "learner")] and odd.stages == 1


def test_it_wants_a_measurement_and_says_when_nothing_fits():
    with pytest.raises(MeasureFirst, match="0 of 3 are measured yet"):
        Auto(AutoConfig()).plan(GPUS2, evolve(JOB, measured=None))
    with pytest.raises(DoesNotFit, match="none of .* ways to place 16 rows on 2 devices fits; the fastest: 16 rows of"):
        Auto(AutoConfig()).plan(GPUS2, evolve(JOB, row_memory=2**40))
