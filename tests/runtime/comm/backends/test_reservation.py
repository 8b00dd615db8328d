"""What a plan reserves on Ray, and what is said when it is not there."""

from __future__ import annotations

from collections import namedtuple

import psutil
import pytest
import ray
from scripted_runs import one_token

from vla_rl.core.errors import WorkerDied
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Node, Plan, Slot
from vla_rl.runtime.comm.backends import reservation
from vla_rl.runtime.comm.backends.reservation import bundles_of, choose_store, nodes_of, reserve_slots
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
def test_what_others_use_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(reservation, "PATIENCE_S", 1.0)
    with one_token():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, **choose_store(tmp_path))
        try:
            group, bundle_of = reserve_slots(ray, [Slot(roles=("sim",), cpus=1.5)], 60.0)
            assert bundle_of == [0]
            message = r"workers need 1 CPU and 0 GPUs, and of the cluster's CPUs 0.5 and of its GPUs 0 are free"
            looks = []
            monkeypatch.setattr(reservation, "nodes_of", lambda ray: looks.append(ray) or nodes_of(ray))
            with pytest.raises(DoesNotFit, match=message):
                reserve_slots(ray, [Slot(roles=("policy",), cpus=1.0)], 60.0)
            assert len(looks) <= 3, "it waits between two looks"
            monkeypatch.setattr(reservation, "nodes_of", nodes_of)
            ray.util.remove_placement_group(group)
            with pytest.raises(WorkerDied, match="node 'gone' left the cluster and did not come back within 1 s"):
                reserve_slots(ray, [Slot(roles=("sim",), node="gone")], 60.0)
        finally:
            ray.shutdown()


@pytest.mark.parametrize(("there", "shared"), [(2**26, False), (2**28, True), (2**60, True), (None, False)])
def test_the_object_store_is_in_shared_memory_where_there_is_enough(tmp_path, monkeypatch, there, shared):
    """Otherwise Ray takes files. 64 MiB are what a container of Docker has; one may have none."""
    monkeypatch.setattr(reservation, "SHARED", tmp_path / "absent" if there is None else tmp_path)
    monkeypatch.setattr(reservation.shutil, "disk_usage", lambda path: Usage(there, 0, there))
    options = choose_store(tmp_path)
    assert 75 * 2**20 < options["object_store_memory"] < 0.31 * psutil.virtual_memory().total
    assert options.get("_plasma_directory") == (None if shared else str(tmp_path))
    assert not shared or options["object_store_memory"] < there
