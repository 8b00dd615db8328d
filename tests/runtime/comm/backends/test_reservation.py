"""What a plan reserves on Ray, and what is said when it is not there."""

from __future__ import annotations

from collections import namedtuple

import pytest
import ray
from scripted_runs import one_token

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Node, Plan, Slot
from vla_rl.runtime.comm.backends import reservation
from vla_rl.runtime.comm.backends.reservation import bundles_of, object_store, reserve_slots
from vla_rl.toolkit.placement.checks import validate_plan

Usage = namedtuple("Usage", "total used free")


def test_workers_of_one_gpu_share_a_bundle():
    half = {"device": "cuda", "cpus": 2.0, "gpus": 0.5, "node": "a", "index": 0}
    slots = [
        Slot(roles=("sim",), **half),
        Slot(roles=("policy",), device="cuda", gpus=1.0, node="a", index=1),
        Slot(roles=("policy", "learner"), **half),
        Slot(roles=("sim",), cpus=4.0, node="b"),
        Slot(roles=("sim",), cpus=0.5, index=0),
    ]
    bundles, nodes, bundle_of = bundles_of(slots)
    assert bundles == [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0}, {"CPU": 0.5}]
    assert nodes == ["a", "a", "b", None]
    assert bundle_of == [0, 1, 0, 2, 3]


@pytest.mark.parametrize("cpus", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("workers", [1, 3, 6, 7, 9])
def test_equal_shares_of_all_cpus_fit(cpus, workers):
    bundles, _, _ = bundles_of([Slot(roles=("sim",), cpus=cpus / workers)] * workers)
    asked = sum(round(bundle["CPU"] * 10_000) for bundle in bundles)
    assert cpus * 10_000 - workers <= asked <= cpus * 10_000


def test_a_worker_that_no_node_has_room_for_is_said_at_once():
    nodes = tuple(Node(name=name, cpus=4, gpus=0, memory=2**34) for name in "ab")
    cluster = Cluster(cpus=8, gpus=0, memory=2**35, nodes=nodes)
    plan = Plan(slots=(Slot(roles=("sim", "policy", "learner"), cpus=6.0),))
    with pytest.raises(DoesNotFit, match="a worker needs 6 CPUs on one node, and the largest has 4"):
        validate_plan(plan, cluster, Job(num_envs=4, group_size=1, env="toy"))


@pytest.mark.ray
@pytest.mark.own_ray
def test_what_others_use_is_not_there(monkeypatch):
    monkeypatch.setattr(reservation, "PATIENCE_S", 1.0)
    with one_token():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            group, bundle_of = reserve_slots(ray, [Slot(roles=("sim",), cpus=1.5)], 60.0)
            assert bundle_of == [0]
            message = r"workers need 1 CPU and 0 GPUs, and of the cluster's CPUs 0.5 and of its GPUs 0 are free"
            with pytest.raises(DoesNotFit, match=message):
                reserve_slots(ray, [Slot(roles=("policy",), cpus=1.0)], 60.0)
            ray.util.remove_placement_group(group)
            with pytest.raises(DoesNotFit, match="node 'gone' left the cluster and did not come back within 1 s"):
                reserve_slots(ray, [Slot(roles=("sim",), node="gone")], 60.0)
        finally:
            ray.shutdown()


@pytest.mark.parametrize(("free", "size"), [(2**29, int(0.9 * 2**29)), (2**60, None)])
def test_the_object_store_fits_into_shared_memory(tmp_path, monkeypatch, free, size):
    monkeypatch.setattr(reservation.shutil, "disk_usage", lambda path: Usage(2 * free, free, free))
    assert object_store(tmp_path) == size
    assert object_store(tmp_path / "absent") is None


def test_shared_memory_that_is_too_small_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setattr(reservation.shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**26))
    with pytest.raises(UserError, match=r"has 64 MiB free, and workers need 256 MiB .* --shm-size=8g"):
        object_store(tmp_path)
