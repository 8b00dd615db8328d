"""Lists of devices: what they name, and what is refused."""

from __future__ import annotations

import pytest
from attrs import evolve

from vla_rl.core.plan import Batching, Cluster, DoesNotFit, Job, Node, Plan, Slot
from vla_rl.toolkit.placement.checks import validate_plan
from vla_rl.toolkit.placement.devices import Device, RoleDevices, arrange_workers, find_devices

GIB = 2**30
BOX = Cluster(cpus=16, gpus=4, memory=64 * GIB)
CORES = Cluster(cpus=2, gpus=0, memory=8 * GIB)
RACK = Cluster(
    cpus=72,
    gpus=8,
    memory=384 * GIB,
    nodes=(
        Node(name="sims-1", cpus=32, gpus=0, memory=128 * GIB),
        Node(name="gpu-2", cpus=16, gpus=4, memory=128 * GIB),
        Node(name="gpu-1", cpus=24, gpus=4, memory=128 * GIB),
    ),
)
JOB = Job(num_envs=8, group_size=2, env="sim", env_memory=GIB)


def indices(text, cluster):
    return [device.index for device in find_devices("sim", text, cluster)]


def test_ranges_lists_and_cores():
    assert indices("0-3", BOX) == [0, 1, 2, 3]
    assert indices("3, 0", BOX) == [3, 0]
    assert indices("0-3", CORES) == [0, 1, 2, 3]
    assert find_devices("sim", "cpu", BOX) == [Device("this machine", None)]


def test_numbers_go_over_the_nodes_in_the_order_of_their_names():
    assert find_devices("sim", "3-4", RACK) == [Device("gpu-1", 3), Device("gpu-2", 0)]
    assert find_devices("sim", "gpu-2:0-1", RACK) == [Device("gpu-2", 0), Device("gpu-2", 1)]
    assert find_devices("sim", "gpu-*:3", RACK) == [Device("gpu-1", 3), Device("gpu-2", 3)]
    assert find_devices("sim", "sims-*:cpu", RACK) == [Device("sims-1", None)]


@pytest.mark.parametrize(
    ("text", "cluster", "message"),
    [
        ("0-4", BOX, r"placement.sim: device 4 is needed, and there are 4 GPUs: 0-3"),
        ("1", Cluster(cpus=4, gpus=1, memory=GIB), r"device 1 is needed, and there is 1 GPU: 0$"),
        ("4", CORES, r"device 4 is needed, and there are 4 CPU slots \(2 a core\): 0-3"),
        ("gpu-1:4", RACK, r"device 4 is needed, and there are 4 GPUs on node 'gpu-1': 0-3"),
        ("sims-1:0", RACK, r"device 0 is needed, and there are 0 GPUs on node 'sims-1'$"),
        ("gpu-3:0", RACK, r"no node is named 'gpu-3'; there are: gpu-1, gpu-2, sims-1"),
        ("0-1,1", BOX, r"names device 1 twice"),
    ],
)
def test_devices_that_are_not_there(text, cluster, message):
    with pytest.raises(DoesNotFit, match=message):
        find_devices("sim", text, cluster)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sim": "0..3"}, r"'0..3' names no device; write 0, 0-3"),
        ({"sim": "3-0"}, "'3-0' counts downwards; write 0-3"),
        ({"policy": "cpu"}, "only simulators are placed on CPUs by name"),
    ],
)
def test_text_that_names_no_device(keys, message):
    with pytest.raises(ValueError, match=message):
        RoleDevices(**keys)


def test_all_forms_of_a_list_are_one():
    assert RoleDevices(sim=(0, 2), policy=1).sim == "0,2"
    assert RoleDevices(policy=1).policy == "1"


def test_roles_of_one_device_share_a_worker():
    on = [Device("this machine", i) for i in range(2)]
    plan = arrange_workers(BOX, JOB, {"sim": on[:1], "policy": on[1:], "learner": on})
    assert [(s.roles, s.device, s.cpus, s.gpus, s.index) for s in plan.slots] == [
        (("sim", "learner"), "cuda", 15.0, 1.0, 0),
        (("policy", "learner"), "cuda", 1.0, 1.0, 1),
    ]


def test_sim_workers_share_their_gpu_equally():
    on = [Device("this machine", 0)]
    plan = arrange_workers(BOX, JOB, dict.fromkeys(("sim", "policy", "learner"), on), sim_workers=2)
    assert [(s.roles, s.gpus, s.index) for s in plan.slots] == [
        (("sim",), 0.333, 0),
        (("sim",), 0.333, 0),
        (("policy", "learner"), 0.333, 0),
    ]


def test_simulators_on_nodes_without_gpus():
    gpus = find_devices("policy", "0-7", RACK)
    plan = arrange_workers(
        RACK, JOB, {"sim": find_devices("sim", "sims-1:cpu", RACK), "policy": gpus, "learner": gpus}, sim_workers=8
    )
    assert {(s.node, s.device, s.cpus, s.gpus) for s in plan.slots if "sim" in s.roles} == {("sims-1", "cpu", 4.0, 0.0)}
    assert [s.node for s in plan.slots if "policy" in s.roles] == ["gpu-1"] * 4 + ["gpu-2"] * 4


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ({}, {"sim_workers": 3}, "3 sim workers cannot be spread evenly over 2 devices"),
        ({}, {"stages": 3}, r"8 envs cannot be shared evenly by 6 lanes \(2 sim workers x 3\); .* a multiple of 6"),
        ({"global_batch": 33}, {}, r"33 samples \(train.global_batch\) cannot be shared evenly by 2 learners"),
        ({"num_envs": 80}, {}, r"80 envs of sim need about 80.0 GiB .* there are 64.0 GiB; at most 64 envs fit"),
        ({}, {"offload": frozenset({"policy"})}, "offload.policy has nothing to free"),
    ],
)
def test_what_does_not_add_up_says_the_numbers(job, options, message):
    on = [Device("this machine", i) for i in range(4)]
    with pytest.raises(DoesNotFit, match=message):
        arrange_workers(BOX, evolve(JOB, **job), {"sim": on[:2], "policy": on[2:], "learner": on[2:]}, **options)


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        ({"cpus": 25.0, "node": "gpu-1"}, "1 workers need 25 CPUs on node 'gpu-1', and there are 24"),
        ({"gpus": 9.0}, "1 workers need 9 GPUs, and there are 8"),
        ({"node": "gpu-3"}, "no node is named 'gpu-3'; there are: sims-1, gpu-2, gpu-1"),
        ({"roles": ("sim", "policy")}, "the placement has no slot for the learner role"),
    ],
)
def test_what_any_strategy_answers_is_checked(slot, message):
    with pytest.raises(DoesNotFit, match=message):
        validate_plan(Plan(slots=(Slot(**{"roles": ("sim", "policy", "learner"), **slot}),)), RACK, JOB)


def sims_apart(policies, **options):
    roles = [("sim",)] + [("policy",)] * policies + [("learner",)]
    return Plan(slots=tuple(Slot(roles=of_slot) for of_slot in roles), **options)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Plan(slots=(Slot(roles=("sim", "policy", "learner")),), batching=Batching(max_wait_s=0.5)),
            "max_wait_s 0.5, and",
        ),
        (sims_apart(2, stages=2, batching=Batching(max_wait_s=0.5)), "every policy worker acts for one lane"),
    ],
)
def test_what_would_have_no_effect_is_refused(plan, message):
    with pytest.raises(DoesNotFit, match=message):
        validate_plan(plan, RACK, JOB)


def test_a_window_of_several_lanes_may_wait():
    plan = sims_apart(1, stages=2, batching=Batching(max_wait_s=0.5))
    assert validate_plan(plan, RACK, JOB) is plan


def test_simulators_are_counted_where_they_are():
    on = find_devices("sim", "gpu-1:0", RACK)
    with pytest.raises(DoesNotFit, match=r"200 envs of sim need about 200.0 GiB .* 128.0 GiB on node 'gpu-1'"):
        arrange_workers(RACK, evolve(JOB, num_envs=200), dict.fromkeys(("sim", "policy", "learner"), on))


def test_a_policy_without_a_lane():
    on = [Device("this machine", i) for i in range(4)]
    with pytest.raises(DoesNotFit, match="3 policy workers need a lane each, and there is 1"):
        arrange_workers(BOX, JOB, {"sim": on[:1], "policy": on[1:], "learner": on})
