"""Running ahead, simulated: what a lag reaches of the bound, and what the flow promises."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, log, sqrt
from pathlib import Path
from random import Random

import pytest
from attrs import evolve

from vla_rl.core.plan import Cluster, Plan, Slot
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.planning.forecast import compared_seconds, forecast_job, forecast_spec, overlap
from vla_rl.runtime.planning.job_model import reduce_job
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.runtime.planning.simulate import Simulation

ENVS, MEAN, CHUNK = 64, 60, 0.01
PLAN = Plan(slots=tuple(Slot(roles=(role,)) for role in ("sim", "policy", "learner")))
LAGS = range(4)
EXAMPLE = Path(__file__).parents[3] / "examples" / "tabletop_grpo.yaml"


def lengths(cv):
    """Chunk steps of tickets, lognormal, of mean `MEAN`."""
    if not cv:
        return (MEAN,)
    random, sigma = Random(5), sqrt(log(1 + cv**2))
    drawn = [random.lognormvariate(0.0, sigma) for _ in range(4000)]
    return tuple(max(1, round(MEAN * x * len(drawn) / sum(drawn))) for x in drawn)


def job(cv, tickets, update):
    """A simulator of 64 envs in parallel, and an update of this many times the seconds that envs need for a step's
    tickets. -> (profile, those seconds)."""
    steps = lengths(cv)
    seconds = sum(steps) / len(steps) * tickets / ENVS * CHUNK
    sim = Cost(seconds=CHUNK, num_envs=ENVS, fixed=1.0)
    learner = Cost(seconds=update * seconds)
    return Profile(chunk_steps=steps, sim=sim, policy=Cost(seconds=0.0), learner=learner, message=0.0), seconds


def shares(cv, tickets, update, part_size=0.0):
    """Return each lag's share of the bound. `part_size`: tickets of a part that is trained on before the others."""
    profile, seconds = job(cv, tickets, update)
    there = assign_workers(PLAN, ENVS, one_process=False)
    job_of = {"tickets": tickets, "chunk": 1, "part_size": part_size}
    found = [forecast_job(PLAN, there, profile, max_lag=lag, **job_of) for lag in LAGS]
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


@pytest.mark.parametrize(
    ("tickets", "cv", "published"),
    [
        (64, 0.3, (0.38, 0.74, 0.97)),
        (256, 0.3, (0.67, 1.00)),
        (256, 0.6, (0.51, 0.94)),
        (256, 1.0, (0.36, 0.67, 0.90)),
    ],
)
def test_what_a_lag_reaches_with_streamed_updates(tickets, cv, published):
    """Another simulation: lognormal tickets on 64 lanes, trained on in eighths, in the order of their numbers."""
    assert shares(cv, tickets, 1.0, tickets / 8)[: len(published)] == pytest.approx(published, abs=0.035)


def test_a_spec_that_streams():
    """Parts are full micro-batches; the bound is that of the whole update."""
    changes = ["placement={type: disaggregated}", "env.num_envs=64", "rollout.episodes=128", "train.global_batch=null"]
    profile, _ = job(0.3, 128, 1.0)
    found = {}
    for stream, micro_batch in ((False, 32), (True, 32 * MEAN), (True, 32)):
        spec = load_spec(
            EXAMPLE, [*changes, f"asynchrony.streaming_update={stream}".lower(), f"train.micro_batch={micro_batch}"]
        )
        found[stream, micro_batch] = overlap(PLAN, spec, profile)
        assert compared_seconds(PLAN, spec, profile) == found[stream, micro_batch].by_lag[0].iteration
    whole, coarse, fine = found.values()
    assert whole.lower_bound == coarse.lower_bound == fine.lower_bound
    assert whole.bound_share(0) < coarse.bound_share(0) - 0.1 < fine.bound_share(0) - 0.12
    shared = Plan(slots=(Slot(roles=("sim", "policy", "learner")),))
    assert compared_seconds(shared, spec, profile) == inf


def rules(cv, tickets, update, lag, steps=400):
    """Seconds of a step by the rules alone: any env plays the next ticket once it is free and step s - lag - 1 is over;
    a step is trained on when all its tickets are played."""
    random, drawn = Random(7), lengths(cv)
    envs, over, now = [0.0] * ENVS, [], 0.0
    for step in range(steps):
        admitted = over[step - lag - 1] if step > lag else 0.0
        for _ in range(tickets):
            end = max(heappop(envs), admitted) + random.choice(drawn) * CHUNK
            heappush(envs, end)
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
    profile, _ = job(1.0, ENVS, 1.0)
    part = reduce_job(PLAN, assign_workers(PLAN, ENVS, one_process=False), profile, ENVS, moving=0.0)
    steps = Simulation(part, profile, lag).run_steps(20)
    assert max(step.lag for step in steps) == lag
    assert steps[-1].held == (lag + 1) * ENVS


def test_with_several_workers_no_row_runs_dry_while_the_driver_waits():
    """Workers hold what they need for as long as an update takes."""
    profile = Profile(chunk_steps=10, sim=Cost(seconds=0.1, num_envs=32), policy=Cost(seconds=0.0), message=0.0)
    profile = evolve(profile, learner=Cost(seconds=4.0))
    pairs = Plan(slots=tuple(Slot(roles=(role,)) for role in ("sim", "sim", "policy", "policy", "learner")))

    def seconds(plan, tickets):
        there = assign_workers(plan, ENVS, one_process=False)
        return forecast_job(plan, there, profile, tickets=tickets, chunk=1, max_lag=1).iteration

    assert seconds(pairs, 4 * ENVS) == pytest.approx(4.0)
    assert seconds(pairs, 2 * ENVS) == pytest.approx(4.0)


@pytest.mark.parametrize("tickets", [ENVS, 3 * ENVS])
def test_what_is_left_out_of_a_simulation_changes_nothing(tickets, monkeypatch):
    """Many pairs of workers that do the same, next to pairs that each differ by a hair."""
    slots = [Slot(roles=("sim",))] * 8 + [Slot(roles=("policy",))] * 4 + [Slot(roles=("learner",))]
    alike = Plan(slots=tuple(slots))
    unlike = Plan(slots=tuple(evolve(slot, cpus=1.0 + i) for i, slot in enumerate(slots)))
    cost = Cost(seconds=0.1, num_envs=8, fixed=0.3)
    profile = Profile(chunk_steps=7, sim=cost, policy=cost, learner=Cost(seconds=1.0), reset=cost)
    parts = [reduce_job(p, assign_workers(p, ENVS, one_process=False), profile, tickets, 0.0) for p in (alike, unlike)]
    assert len(parts[0].workers) < len(parts[1].workers)
    assert [part.fold for part in parts] == ([16, 16] if tickets == ENVS else [1, 1])
    found = [Simulation(part, profile, 0).run_steps(2)[-1].end for part in parts]
    assert found[0] == pytest.approx(found[1])
    monkeypatch.setattr("vla_rl.runtime.planning.job_model._fold_envs", lambda workers: (list(workers), 1))
    monkeypatch.setattr("vla_rl.runtime.planning.job_model._in_step", lambda workers, servers: (list(workers), {}))
    whole = reduce_job(unlike, assign_workers(unlike, ENVS, one_process=False), profile, tickets, 0.0)
    assert len(whole.workers) == 12 and whole.fold == 1
    assert Simulation(whole, profile, 0).run_steps(2)[-1].end == pytest.approx(found[0])


@pytest.mark.parametrize("config", ["{type: collocated}", "{type: hybrid, pipeline_stages: 2}"])
def test_a_thousand_gpus(config):
    cost = Cost(seconds=0.8, num_envs=8, fixed=0.5)
    profile = Profile(chunk_steps=64, sim=cost, policy=cost, learner=Cost(seconds=100.0, num_envs=8))
    spec = load_spec(
        EXAMPLE, ["env.num_envs=16384", "rollout.episodes=65536", "train.global_batch=65536", f"placement={config}"]
    )
    plan = plan_for(spec, Cluster(cpus=16384, gpus=1024, memory=2**47))
    found = forecast_spec(plan, spec, profile)
    assert len(plan.slots) == 1024
    assert found.env_steps == 65536 * 64 * spec.rollout.chunk
    assert found.bottleneck in ("sim", "policy")
