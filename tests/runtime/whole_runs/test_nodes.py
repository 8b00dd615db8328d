"""A cluster of two nodes: workers are where the placement says, and a run survives the loss of one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from scripted_runs import LOSS_APART, one_token, scripted_spec

from vla_rl.core.errors import StopAndSave
from vla_rl.core.plan import DoesNotFit
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.comm.backends import ray as ray_backend
from vla_rl.runtime.comm.backends.reservation import nodes_of
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.run_folder.folder import RunFolder
from vla_rl.runtime.start import start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.own_ray]
APART = {"type": "hybrid", "sim": "body:cpu", "policy": "brain:0", "learner": "brain:0"}
JOIN = {"backend": "ray", "address": "auto"}


@contextmanager
def made_cluster(*names):
    """A cluster of nodes with a core each; the first is the head."""
    with one_token(), pytest.MonkeyPatch.context() as patch:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": names[0]})
        made.named = {name: made.add_node(num_cpus=1, node_name=name) for name in names[1:]}
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def cluster():
    with made_cluster("brain", "body") as made:
        yield made


def test_workers_are_where_the_placement_says(cluster):
    runtime = start(parse_spec(scripted_spec(runtime=JOIN, placement=APART)))
    try:
        names = {identity: node.name for identity, node in nodes_of(ray)}
        where = [ray.util.placement_group_table(g)["bundles_to_node_id"][b] for g, b in runtime.backend.held]
        roles = [assignment.slot.roles for assignment in runtime.fleet.assignments]
        assert list(zip(roles, (names[node] for node in where), strict=True)) == [
            (("sim",), "body"),
            (("policy", "learner"), "brain"),
        ]
    finally:
        runtime.workers.close()
    with pytest.raises(DoesNotFit, match=r"no node is named 'head'; there are: body, brain"):
        start(parse_spec(scripted_spec(runtime=JOIN, placement={**APART, "policy": "head:0"})))
    with pytest.raises(DoesNotFit, match=r"device 2 is needed, and there are 2 CPU slots .* on node 'brain': 0-1"):
        start(parse_spec(scripted_spec(runtime=JOIN, placement={**APART, "learner": "brain:2"})))


def test_a_run_survives_a_sim_node_that_comes_back_a_sim_worker_and_a_learner(cluster, train, monkeypatch):
    _, expected = train("local")
    broken = []
    issue = StepRollouts.issue

    def breaking(rollouts, step, tickets):
        backend = rollouts.fleet.backend
        if step == 2 and "sim" not in broken:
            broken.append("sim")
            cluster.remove_node(cluster.named["body"])
            cluster.add_node(num_cpus=1, node_name="body")
        if step == 3 and "process" not in broken:
            broken.append("process")
            ray.kill(backend.actors[0])
        if step == 4 and "learner" not in broken:
            broken.append("learner")
            ray.kill(backend.actors[1])
        issue(rollouts, step, tickets)

    monkeypatch.setattr(StepRollouts, "issue", breaking)
    results, got = train("nodes", runtime=JOIN, placement=APART, train={"checkpoint_every": 1})
    assert broken == ["sim", "process", "learner"] and results["faults"] == 2
    assert [line.get("env/return") for line in got] == [line.get("env/return") for line in expected]
    for a, b in zip(expected, got, strict=True):
        assert a.get("loss/total") == pytest.approx(b.get("loss/total"), abs=LOSS_APART)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["body", "mind"])
@pytest.mark.parametrize("back", ["before", "after"])
def test_a_node_that_is_killed_may_come_back_before_and_after_ray_calls_it_dead(train, monkeypatch, lost, back):
    """Ray calls a killed node alive for about 15 s; simulators are on `body`, policy and learner on `mind`."""
    placement = {"type": "hybrid", "sim": "body:cpu", "policy": "mind:0", "learner": "mind:0"}
    returned = []
    issue = StepRollouts.issue

    def return_node():
        while back == "after" and any(
            node["Alive"] and node["NodeName"] == lost for node in cluster.global_state.node_table()
        ):
            time.sleep(0.2)
        command = ("-m", "ray.scripts.scripts", "start", "--address", cluster.address, "--num-cpus=1", "--block")
        returned.append(subprocess.Popen([sys.executable, *command, f"--node-name={lost}"]))

    returning = threading.Thread(target=return_node)

    def kill_node(rollouts, step, tickets):
        if step == 2 and not returning.ident:
            cluster.remove_node(cluster.named[lost], allow_graceful=False)
            returning.start()
        issue(rollouts, step, tickets)

    monkeypatch.setattr(StepRollouts, "issue", kill_node)
    with made_cluster("brain", "body", "mind") as cluster:
        try:
            _, got = train("nodes", runtime=JOIN, placement=placement, train={"checkpoint_every": 1})
        finally:
            returning.join()
            for process in (*psutil.Process(returned[0].pid).children(recursive=True), returned[0]):
                process.kill()
    monkeypatch.undo()
    _, expected = train("local")
    assert [line.get("env/return") for line in got] == [line.get("env/return") for line in expected]
    for a, b in zip(expected, got, strict=True):
        assert a.get("loss/total") == pytest.approx(b.get("loss/total"), abs=LOSS_APART)


def gcs_of(cluster):
    """The process of the cluster's head that knows nodes and actors."""
    return cluster.head_node.all_processes["gcs_server"][0].process


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_without_the_head_of_its_cluster_saves_and_says_so_or_finishes(train, tmp_path, monkeypatch, step):
    """Ray would end it after a minute. In the last step there is nothing left to save."""
    monkeypatch.setattr(ray_backend, "HEAD_LOOK_S", 0.2 if step == 2 else 600.0)
    issue = StepRollouts.issue
    killed = []

    def kill_head(rollouts, now, tickets):
        if now == step:
            killed.append(now)
            gcs_of(cluster).kill()
        issue(rollouts, now, tickets)

    monkeypatch.setattr(StepRollouts, "issue", kill_head)
    changes = {"runtime": JOIN, "placement": APART, "env": {"latency_s": 1.0 if step == 2 else 0.0}}
    with made_cluster("brain", "body") as cluster:
        if step == 4:
            assert train("run", eval={"before": False}, **changes)[0]["steps"] == 4
        else:
            with pytest.raises(StopAndSave, match=r"head of the Ray cluster \(.*\) has not answered") as caught:
                train("run", eval={"before": False}, **changes)
            (note,) = caught.value.__notes__
            state, _ = RunFolder(tmp_path / "run").restore_checkpoint()
            assert f"stopped after step {state.step}; saved" in note and "--resume" in note and state.step >= 1
    assert killed == [step]
