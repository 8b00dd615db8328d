"""Test which split of the devices `auto` chooses, by the simulation that a run and `vla-rl plan` give it."""

from __future__ import annotations

from functools import partial

import pytest
from attrs import evolve

from vla_rl.core.plan import Cluster, DoesNotFit, Job, MeasureFirst
from vla_rl.plugins.placement.auto.config import AutoConfig
from vla_rl.plugins.placement.auto.impl import Auto, list_splits
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.planning.forecast import forecast_job
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.toolkit.placement.devices import arrange_workers, busy_devices

EVEN = Profile(
    chunk_steps=32,
    sim=Cost(seconds=0.1, num_envs=16),
    policy=Cost(seconds=0.1, num_envs=16),
    message=0.0,
    reset=Cost(seconds=0.0),
)


def gpus(count):
    return Cluster(cpus=8 * count, gpus=count, memory=2**37)


def seconds(profile, envs, plan):
    return forecast_job(plan, assign_workers(plan, envs, one_process=False), profile, chunk=1).iteration


def job_of(profile, envs=16):
    return Job(num_envs=envs, group_size=1, env="sim", forecast=partial(seconds, profile, envs))


def chosen(profile, envs, devices):
    """(sim, policy, learner workers, stages) of the plan, and seconds of its iteration."""
    plan = Auto(AutoConfig()).plan(gpus(devices), job_of(profile, envs))
    counts = tuple(len(plan.hosting(role)) for role in ("sim", "policy", "learner"))
    return (*counts, plan.stages), seconds(profile, envs, plan)


def test_roles_that_take_turns_share_all_devices():
    split, iteration = chosen(EVEN, 16, 2)
    assert split == (2, 2, 2, 1)
    assert iteration == pytest.approx(32 * (0.05 + 0.05)), "four lanes on a device each would take 3.225 s"


@pytest.mark.parametrize(("sim", "policy", "workers"), [(0.02, 0.14, (1, 2)), (0.14, 0.02, (2, 1))])
def test_what_takes_longer_gets_more_devices(sim, policy, workers):
    """16 envs have no three thirds, so that the roles have separate devices."""
    profile = evolve(EVEN, sim=Cost(seconds=sim, num_envs=16), policy=Cost(seconds=policy, num_envs=16))
    split, iteration = chosen(profile, 16, 3)
    assert split[:3] == (*workers, 3)
    cluster, job = gpus(3), job_of(profile)
    every = [arrange_workers(cluster, job, of, stages=stages) for of, stages in list_splits(busy_devices(cluster), 16)]
    assert len(every) == 6 and iteration == pytest.approx(min(seconds(profile, 16, plan) for plan in every))


def test_of_equals_the_simpler_one_is_taken():
    free = evolve(EVEN, sim=Cost(seconds=0.0), policy=Cost(seconds=0.0))
    assert chosen(free, 16, 3)[0] == (2, 1, 3, 1)
    assert chosen(free, 16, 2)[0] == (2, 2, 2, 1)


def test_learners_are_on_all_devices():
    assert chosen(evolve(EVEN, learner=Cost(seconds=9.6)), 15, 2)[0] == (1, 1, 2, 1), "15 envs have no two halves"


def test_it_wants_a_measurement_and_says_when_nothing_fits():
    with pytest.raises(MeasureFirst, match="0 of 3 are measured yet"):
        Auto(AutoConfig()).plan(gpus(2), evolve(job_of(EVEN), forecast=None))
    with pytest.raises(
        DoesNotFit, match="none of .* ways to device 16 envs on 2 devices fits; the simplest: 16 envs of"
    ):
        Auto(AutoConfig()).plan(gpus(2), evolve(job_of(EVEN), env_memory=2**40))
