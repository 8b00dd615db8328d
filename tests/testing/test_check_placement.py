from __future__ import annotations

import itertools

import pytest

from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Batching, DoesNotFit, Plan, Slot
from vla_rl.testing import CheckFailed, check_placement


class OneSlot(Placement):
    """Everything in one slot."""

    def __init__(self, plan: dict | None = None, slot: dict | None = None) -> None:
        self.plan_options, self.slot_options = plan or {}, slot or {}

    def plan(self, cluster, job):
        need = job.num_envs * job.env_memory
        if need > cluster.memory:
            raise DoesNotFit(f"{job.num_envs} envs need {need} bytes, there are {cluster.memory}")
        slot = {"roles": ("sim", "policy", "learner"), "cpus": cluster.cpus} | self.slot_options
        return Plan(slots=(Slot(**slot),), **self.plan_options)


def findings(placement: Placement) -> str:
    with pytest.raises(CheckFailed) as failed:
        check_placement(placement)
    return str(failed.value)


def test_a_sane_strategy_passes() -> None:
    check_placement(OneSlot())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slot": {"roles": ("sim", "policy")}}, "has no slot for the learner role"),
        ({"slot": {"cpus": 9.0}}, "workers need 9 CPUs, and there are 8"),
        ({"slot": {"device": "cuda:0"}}, "set `device` and `gpus` together"),
        (
            {"slot": {"roles": ("sim", "policy", "learner", "critic")}},
            "has the roles ('sim', 'policy', 'learner', 'critic')",
        ),
        ({"plan": {"stages": 100}}, "64 envs cannot be shared evenly by 100 lanes"),
        ({"plan": {"batching": Batching(max_wait_s=0.1)}}, "every policy worker simulates its own envs"),
        ({"plan": {"offload": frozenset({"gpu"})}}, "expected offload among"),
    ],
)
def test_plans_that_do_not_add_up_are_found(options: dict, text: str) -> None:
    assert text in findings(OneSlot(**options))


def test_state_and_a_blind_yes_are_found() -> None:
    class Counting(OneSlot):
        count = itertools.count(1)

        def plan(self, cluster, job):
            return Plan(slots=(Slot(roles=("sim", "policy", "learner")),), stages=next(self.count))

    text = findings(Counting())
    assert "expected equal plans for equal arguments, got two different ones" in text
    assert "expected DoesNotFit for 1,000 million envs of 1 TiB, got a plan of 1 slots" in text


def test_a_strategy_that_never_fits_is_found() -> None:
    class Never(OneSlot):
        def plan(self, cluster, job):
            raise DoesNotFit("too small")

    text = findings(Never())
    assert "expected a plan on one of 3 clusters at least" in text
    assert "expected a message with numbers, got 'too small'" in text
