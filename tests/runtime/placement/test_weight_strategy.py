"""The strategy that transfers weights: what `auto` chooses, and what is refused, with the choices and what to do."""

from __future__ import annotations

import logging

import pytest
from scripted_runs import scripted_spec

from vla_rl.core.plan import Cluster, Plan, Slot
from vla_rl.core.spec.spec import SpecError, parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.placement.weight_strategy import (
    TransferNotPossible,
    WorkerLocation,
    choose_strategy,
    planned_strategy,
)

GPUS = Cluster(cpus=16, gpus=4, memory=2**36)


def at(worker, gpu=None, machine="a", nccl=True):
    device = "cpu" if gpu is None else "cuda"
    return WorkerLocation(worker=worker, machine=machine, device=device, gpu=gpu and (machine, gpu), nccl=nccl)


@pytest.mark.parametrize(
    ("chosen", "policies"),
    [
        ("shared", []),
        ("ipc", [at(0, "1")]),
        ("ipc", [at(0, "1"), at(1, "1")]),
        ("nccl", [at(0, "2"), at(1, "3")]),
        ("nccl", [at(0, "1", machine="b")]),
        ("host", [at(0, "1"), at(1, "2")]),
        ("host", [at(0, "2"), at(1, "2")]),
        ("host", [at(0)]),
        ("host", [at(0, "2", nccl=False)]),
        ("host", [WorkerLocation(worker=0, machine="a", device="cuda")]),
    ],
)
def test_auto_chooses_by_devices(chosen, policies):
    assert choose_strategy("auto", at(2, "1"), policies) == chosen


def test_auto_is_host_on_cpus():
    assert choose_strategy("auto", at(2), [at(0), at(1)]) == "host"
    assert choose_strategy("nccl", at(2), [at(0), at(1)]) == "nccl"


@pytest.mark.parametrize(
    ("requested", "policies", "message"),
    [
        ("shared", [at(0, "2")], "policy worker 0 and learner worker 2 are different workers; use placement"),
        ("ipc", [at(0)], r"one CUDA device of one node, and worker 0 is on CPUs; use host"),
        ("ipc", [at(0, "1", machine="b")], "and worker 0 is on another node than worker 2; use nccl"),
        ("ipc", [at(0, "1"), at(1, "3")], "and worker 1 is on another GPU than worker 2; use nccl"),
        ("nccl", [at(0), at(1)], "workers 0, 1 are on CPUs while others are on GPUs; use host"),
        (
            "nccl",
            [at(0, "3"), at(1, "3")],
            "a GPU for each of its ranks, and workers 0, 1 are on the same one; use ipc",
        ),
        ("nccl", [at(0, "1")], "and workers 2, 0 are on the same one; use ipc where all policies share the GPU"),
        ("nccl", [at(0, "3", nccl=False)], "needs a torch that was built with NCCL, and torch .* of worker 0 was not"),
    ],
)
def test_what_cannot_work_is_refused(requested, policies, message):
    with pytest.raises(TransferNotPossible, match=message):
        choose_strategy(requested, at(2, "1"), policies)


def plan_of(*slots):
    return Plan(
        slots=tuple(
            Slot(roles=roles, device="cpu" if gpu is None else "cuda", gpus=0 if gpu is None else 0.5, index=gpu)
            for roles, gpu in slots
        )
    )


def test_a_plan_tells_where_workers_will_be():
    apart = plan_of((("sim",), None), (("policy",), 0), (("learner",), 1))
    assert planned_strategy("auto", apart, GPUS, True) == "nccl"
    assert planned_strategy("auto", apart, GPUS, False) == "host"
    assert planned_strategy("nccl", apart, GPUS) == "nccl"  # the workers tell whether they have it
    one_gpu = plan_of((("sim",), None), (("policy",), 2), (("learner",), 2))
    assert planned_strategy("auto", one_gpu, GPUS) == "ipc"
    with pytest.raises(TransferNotPossible, match="workers 2, 1 are on the same one"):
        planned_strategy("nccl", one_gpu, GPUS)
    assert planned_strategy("nccl", plan_of((("sim", "policy", "learner"), 0)), GPUS) == "shared"
    assert planned_strategy("shared", plan_of((("sim", "policy"), 0)), GPUS) == "shared"  # it only acts


def check(placement, backend="ray", cluster=None):
    check_spec(
        parse_spec(scripted_spec(placement=placement, runtime={"backend": backend})), training=True, cluster=cluster
    )


@pytest.mark.parametrize("strategy", ["shared", "ipc"])
def test_check_refuses_what_a_plan_rules_out(strategy):
    cpus = Cluster(cpus=4, gpus=0, memory=2**36)
    with pytest.raises(SpecError, match=f"placement.weight_transfer: {strategy} needs"):
        check({"type": "slots", "weight_transfer": strategy}, cluster=cpus)


def test_a_strategy_where_nothing_travels_is_a_warning(caplog):
    caplog.set_level(logging.WARNING)
    for placement in ("slots", "collocated"):
        check({"type": placement, "weight_transfer": "nccl"}, backend="local")
        assert "placement.weight_transfer: nccl has no effect: every policy is in a learner's worker" in caplog.text
        caplog.clear()
        check({"type": placement, "weight_transfer": "shared"}, backend="local")
        assert "weight_transfer" not in caplog.text


def test_a_strategy_is_read_and_written():
    spec = parse_spec(scripted_spec(placement={"type": "slots", "weight_transfer": "host"}))
    assert parse_spec(spec.to_dict()).placement.weight_transfer == "host"
    assert parse_spec(scripted_spec()).placement.weight_transfer == "auto"
    with pytest.raises(SpecError, match="weight_transfer"):
        parse_spec(scripted_spec(placement={"type": "slots", "weight_transfer": "carrier pigeon"}))
