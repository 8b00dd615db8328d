"""Disaggregated and hybrid placement: which role is where."""

from __future__ import annotations

import pytest

from vla_rl.core.plan import Cluster, DoesNotFit, Job
from vla_rl.plugins.placement.fixed.config import DisaggregatedConfig, HybridConfig
from vla_rl.plugins.placement.fixed.impl import Disaggregated, Hybrid

JOB = Job(num_envs=64, group_size=8, env="sim", global_batch=256)
GPUS8 = Cluster(cpus=96, gpus=8, memory=2**40)
GPU1 = Cluster(cpus=16, gpus=1, memory=2**37)
GPUS2 = Cluster(cpus=16, gpus=2, memory=2**37)
CORES2 = Cluster(cpus=2, gpus=0, memory=2**33)


def on(plan):
    """Role -> devices of its workers."""
    return {role: [plan.slots[i].index for i in plan.hosting(role)] for role in ("sim", "policy", "learner")}


def disaggregated(cluster=GPUS8, **keys):
    return Disaggregated(DisaggregatedConfig(**keys)).plan(cluster, JOB)


def hybrid(cluster=GPUS8, **keys):
    return Hybrid(HybridConfig(**keys)).plan(cluster, JOB)


def test_disaggregated_by_itself():
    assert on(disaggregated()) == {"sim": [0, 1], "policy": [2, 3], "learner": [4, 5, 6, 7]}
    assert on(disaggregated(CORES2)) == {"sim": [0], "policy": [1], "learner": [2]}
    assert on(disaggregated(learner="0-3")) == {"sim": [4, 5], "policy": [6, 7], "learner": [0, 1, 2, 3]}


def test_hybrid_by_itself():
    plan = hybrid(pipeline_stages=2)
    assert on(plan) == {"sim": [0, 1, 2, 3], "policy": [4, 5, 6, 7], "learner": list(range(8))}
    assert (len(plan.slots), plan.stages) == (8, 2)
    assert on(hybrid(CORES2)) == {"sim": [0], "policy": [1], "learner": [0, 1]}


def test_simulators_on_cpus_leave_all_gpus_to_the_rest():
    plan = hybrid(sim="cpu", sim_workers=8)
    assert on(plan) == {"sim": [None] * 8, "policy": list(range(8)), "learner": list(range(8))}
    assert [s.cpus for s in plan.slots if "sim" in s.roles] == [11.0] * 8
    assert on(disaggregated(GPUS8, sim="cpu", sim_workers=4)) == {
        "sim": [None] * 4,
        "policy": [0, 1, 2, 3],
        "learner": [4, 5, 6, 7],
    }


def test_one_gpu_for_all_as_two_workers():
    plan = hybrid(GPU1, sim="0", policy="0", sim_workers=1, pipeline_stages=2)
    assert [(s.roles, s.gpus) for s in plan.slots] == [(("sim",), 0.5), (("policy", "learner"), 0.5)]


def test_roles_share_a_device_in_separate_workers():
    """Asynchronous training needs a learner in a separate worker."""
    plan = disaggregated(GPU1, sim="cpu", policy="0", learner="0", share_devices=True)
    assert [(s.roles, s.gpus, s.index) for s in plan.slots] == [
        (("sim",), 0.0, None),
        (("policy",), 0.5, 0),
        (("learner",), 0.5, 0),
    ]
    plan = disaggregated(GPU1, sim="0", policy="0", learner="0", share_devices=True, sim_workers=2)
    assert [(s.roles, s.gpus) for s in plan.slots] == [
        (("sim",), 0.25),
        (("sim",), 0.25),
        (("policy",), 0.25),
        (("learner",), 0.25),
    ]


def test_roles_share_what_is_left():
    assert on(disaggregated(GPU1, share_devices=True)) == {"sim": [0], "policy": [0], "learner": [0]}
    assert on(disaggregated(GPUS2, share_devices=True)) == {"sim": [0], "policy": [0], "learner": [1]}
    assert on(disaggregated(GPU1, sim="cpu", share_devices=True)) == {"sim": [None], "policy": [0], "learner": [0]}
    assert on(disaggregated(share_devices=True)) == on(disaggregated())
    assert on(disaggregated(CORES2, share_devices=True)) == on(disaggregated(CORES2))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: disaggregated(sim="0-3", learner="3-7"), "sim and learner both name device 3; each role has"),
        (
            lambda: disaggregated(GPU1),
            "sim and policy and learner need a separate device each, and there is 1 left",
        ),
        (
            lambda: disaggregated(GPU1, sim="0", policy="0", share_devices=True),
            "learner need a separate device each, and there are 0 left; .* let roles share devices",
        ),
        (lambda: disaggregated(sim="0-9"), "device 9 is needed, and there are 8 GPUs: 0-7"),
        (lambda: hybrid(sim="0-3", policy="3-7"), "sim and policy both name device 3; they run side by side"),
        (
            lambda: hybrid(GPU1),
            r"need a separate device each, and there is 1 left; put simulators on CPUs \(sim: cpu\)",
        ),
        (lambda: hybrid(pipeline_stages=3), r"64 envs cannot be shared evenly by 12 lanes \(4 sim workers x 3\)"),
        (lambda: hybrid(learner="0-2"), "256 samples .* cannot be shared evenly by 3 learners"),
    ],
)
def test_what_does_not_fit_says_what_is_needed_and_what_is_there(plan, message):
    with pytest.raises(DoesNotFit, match=message):
        plan()
