"""From a spec to a plan, which lanes a policy serves, and which rank trains on which sample."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_runs import scripted_spec

from vla_rl.core.plan import Cluster, DoesNotFit, MeasureFirst, Plan, Slot
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.placement.assignments import assign_workers, ranks_of
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Cost, Profile

CORES2 = Cluster(cpus=2, gpus=0, memory=2**33)


def served(sims, policies, stages):
    slots = tuple(Slot(roles=(role,)) for role in ["sim"] * sims + ["policy"] * policies + ["learner"])
    assignments = assign_workers(Plan(slots=slots, stages=stages), 24, one_process=False)
    return [
        [lane.index for lane in assignment.served] for assignment in assignments if "policy" in assignment.slot.roles
    ]


def test_a_policy_serves_whole_sim_workers_or_single_lanes():
    assert served(4, 2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert served(1, 3, 4) == [[0, 3], [1], [2]]


def test_samples_stay_where_every_rank_made_some():
    assert ranks_of(np.array([5, 6, 5, 5]), {5: 0, 6: 1}).tolist() == [0, 1, 0, 0]


def test_ranks_without_a_policy_get_their_part_of_the_others_samples():
    ranks = ranks_of(np.array([1, 1, 1, 1, 1, 1, 1]), {0: 0, 1: 1})
    assert ranks.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert ranks_of(np.array([8, 8, 9, 9]), {0: 0, 1: 1}).tolist() == [0, 0, 1, 1]


def test_a_strategy_that_measures_is_asked_again():
    spec = parse_spec(scripted_spec(placement={"type": "auto"}))
    with pytest.raises(MeasureFirst, match="0 of 3 are measured yet"):
        plan_for(spec, CORES2)
    even = Profile(chunk_steps=2, sim=Cost(seconds=0.1, num_envs=4), policy=Cost(seconds=0.1, num_envs=4))
    assert len(plan_for(spec, CORES2, lambda spec, cluster: even).slots) == 2


def test_the_spec_s_batch_is_part_of_the_job():
    spec = parse_spec(scripted_spec(placement={"type": "hybrid", "learner": "0-2"}))
    with pytest.raises(DoesNotFit, match=r"16 samples \(train.global_batch\) cannot be shared evenly by 3 learners"):
        plan_for(spec, CORES2)
