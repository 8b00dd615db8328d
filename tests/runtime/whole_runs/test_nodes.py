"""A cluster of two nodes: workers are where the placement says, and a run survives the loss of one."""

from __future__ import annotations

import pytest
import ray
from ray.cluster_utils import Cluster
from scripted_runs import LOSS_APART, one_token, scripted_spec

from vla_rl.core.plan import DoesNotFit
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.comm.backends.reservation import nodes_of
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.start import start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.own_ray]
APART = {"type": "hybrid", "sim": "body:cpu", "policy": "brain:0", "learner": "brain:0"}
JOIN = {"backend": "ray", "address": "auto"}


@pytest.fixture(scope="module")
def cluster():
    """Node `brain` with a core, and node `body` with another."""
    with one_token(), pytest.MonkeyPatch.context() as patch:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "brain"})
        made.body = made.add_node(num_cpus=1, node_name="body")
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


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
            cluster.remove_node(cluster.body)
            cluster.body = cluster.add_node(num_cpus=1, node_name="body")
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
