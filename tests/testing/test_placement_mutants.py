"""Placement strategies with one mistake each, all of which `check_placement` finds; and others that pass."""

from __future__ import annotations

import itertools

import attrs
import pytest

from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Batching, DoesNotFit, Plan, Slot
from vla_rl.testing import CheckFailed, check_placement
from vla_rl.testing.slot_placement import Slots, SlotsConfig

MUTANTS: dict[type[Placement], str] = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


class Apart(Placement):
    """Four simulators with one policy and learner, which share the first GPU, if any."""

    sims = 4

    def refuse(self, cluster, job):
        if job.num_envs * job.env_memory > cluster.memory:
            raise DoesNotFit(f"{job.num_envs} envs of {job.env_memory} bytes do not fit into {cluster.memory}")
        if job.num_envs % self.sims:
            raise DoesNotFit(f"{job.num_envs} envs cannot be divided by {self.sims} workers")

    def slots(self, cluster, job):
        share = cluster.cpus / (self.sims + 2)
        brain = {"device": "cuda", "gpus": 0.5, "index": 0} if cluster.gpus else {}
        return [
            *(Slot(roles=("sim",), cpus=share) for _ in range(self.sims)),
            Slot(roles=("policy",), cpus=share, **brain),
            Slot(roles=("learner",), cpus=share, **brain),
        ]

    def options(self, job):
        return {}

    def plan(self, cluster, job):
        self.refuse(cluster, job)
        return Plan(slots=tuple(self.slots(cluster, job)), **self.options(job))


class Named(Apart):
    """Says which machine a worker is on."""

    def slots(self, cluster, job):
        node = cluster.nodes[0]
        share = node.cpus / (self.sims + 2)
        slots = super().slots(attrs.evolve(cluster, gpus=node.gpus), job)
        return [attrs.evolve(slot, cpus=share, node=node.name) for slot in slots]


@pytest.mark.parametrize("strategy", [Apart, Named])
def test_simple_strategies_pass(strategy) -> None:
    check_placement(strategy())


def change(number, **changes):
    """A method that changes one of the slots."""

    def slots(self, cluster, job):
        chosen = list(super(type(self), self).slots(cluster, job))
        chosen[number] = attrs.evolve(chosen[number], **changes)
        return chosen

    return slots


@found_by("64 envs cannot be shared evenly by 5 workers")
class RowsThatDoNotDivide(Apart):
    sims = 5

    def refuse(self, cluster, job):
        if job.num_envs * job.env_memory > cluster.memory:
            raise DoesNotFit(f"{job.num_envs} envs of {job.env_memory} bytes do not fit into {cluster.memory}")


@found_by("plan of 7 envs on 8 CPUs and 0 GPUs: expected DoesNotFit, or a plan that can be carried out")
class RowsThatSometimesDivide(RowsThatDoNotDivide):
    sims = 4


@found_by("64 envs cannot be shared evenly by 12 lanes (4 sim workers x 3)")
class StagesThatDoNotDivide(Apart):
    def options(self, job):
        return {"stages": 3}


@found_by("no node is named 'gpu-box'")
class NodeThatIsNotThere(Apart):
    slots = change(4, node="gpu-box")


@found_by("is on GPU 1, and there is 1, 0 to 0")
class DeviceThatIsNotThere(Apart):
    def slots(self, cluster, job):
        slots = super().slots(cluster, job)
        if cluster.gpus:
            slots[-1] = attrs.evolve(slots[-1], index=1)
        return slots


@found_by("is on device 'cuda:3'")
class DeviceByItsNumber(Apart):
    def slots(self, cluster, job):
        slots = super().slots(cluster, job)
        return [attrs.evolve(slot, device="cuda:3") if slot.gpus else slot for slot in slots]


@found_by("is on device 'gpu'")
class DeviceByAnotherName(Apart):
    def slots(self, cluster, job):
        return [attrs.evolve(s, device="gpu") if s.gpus else s for s in super().slots(cluster, job)]


@found_by("names a role twice")
class RoleTwice(Apart):
    slots = change(4, roles=("policy", "policy"))


@found_by("has no slot for the learner role")
class NoLearner(Apart):
    def slots(self, cluster, job):
        return super().slots(cluster, job)[:-1]


@found_by("has the roles ('learner', 'trainer'); give some of sim, policy, learner")
class UnknownRole(Apart):
    slots = change(5, roles=("learner", "trainer"))


@found_by("ask for 2 of it")
class OneGpuForTwo(Apart):
    def slots(self, cluster, job):
        return [attrs.evolve(slot, gpus=1.0) if slot.gpus else slot for slot in super().slots(cluster, job)]


@found_by("13 workers need more than half a GPU each, and there are 8 GPUs")
class SharesThatDoNotPack(Apart):
    def slots(self, cluster, job):
        slots = super().slots(cluster, job)
        if cluster.gpus < 8:
            return slots
        policy, learner = (attrs.evolve(slot, cpus=1.0, gpus=0.6, index=None) for slot in slots[-2:])
        return [*slots[:-2], policy, *[learner] * 12]


@found_by("CPUs, and there are 8")
class MoreCpus(Apart):
    slots = change(0, cpus=8.0)


@found_by("6 workers need 6 GPUs, and there is 1")
class AGpuForEach(Apart):
    def slots(self, cluster, job):
        if not cluster.gpus:
            return super().slots(cluster, job)
        return [attrs.evolve(slot, device="cuda", gpus=1.0) for slot in super().slots(cluster, job)]


@found_by("set `device` and `gpus` together")
class GpusOnTheCpu(Apart):
    def slots(self, cluster, job):
        return [attrs.evolve(slot, device="cpu") for slot in super().slots(cluster, job)]


@found_by("cannot be shared evenly by 4 learners")
class LearnersThatDoNotDivideTheBatch(Apart):
    def slots(self, cluster, job):
        first = super().slots(cluster, job)[:-1]
        return [*first, *(Slot(roles=("learner",), cpus=cluster.cpus / 30) for _ in range(4))]


@found_by("policy workers need a lane each")
class MorePoliciesThanLanes(Apart):
    def slots(self, cluster, job):
        few = [attrs.evolve(slot, cpus=cluster.cpus / 12) for slot in super().slots(cluster, job)]
        return [*few, *(Slot(roles=("policy",), cpus=cluster.cpus / 12) for _ in range(4))]


@found_by("there is nothing to wait for")
class WaitsForNoOne(Apart):
    sims = 1

    def options(self, job):
        return {"batching": Batching(max_wait_s=0.1)}


@found_by("would split lanes of 16 envs")
class WindowSmallerThanALane(Apart):
    def options(self, job):
        return {"batching": Batching(max_batch=5)}


@found_by("lanes that step at the same time need simulators in separate workers")
class SideBySideWithThePolicy(Apart):
    def slots(self, cluster, job):
        return [Slot(roles=("sim", "policy", "learner"), cpus=cluster.cpus)]

    def options(self, job):
        return {"concurrent_lanes": True}


@found_by("offload.policy has nothing to free")
class OffloadsSharedWeights(Apart):
    def slots(self, cluster, job):
        sims = super().slots(cluster, job)[:-2]
        return [*sims, Slot(roles=("policy", "learner"), cpus=1.0)]

    def options(self, job):
        return {"offload": frozenset({"policy"})}


@found_by("need about 512.0 GiB of memory")
class IgnoresTheMemory(Apart):
    def refuse(self, cluster, job):
        if job.num_envs % self.sims or job.num_envs > 10**6:
            raise DoesNotFit(f"{job.num_envs} envs cannot be divided by {self.sims} workers")


@found_by("equal plans for equal arguments")
class RemembersTheLastCluster(Apart):
    last = None

    def slots(self, cluster, job):
        chosen = self.last or cluster
        self.last = cluster
        return super().slots(attrs.evolve(cluster, cpus=min(chosen.cpus, cluster.cpus)), job)


@found_by("equal plans for equal arguments")
class Alternates(Apart):
    count = itertools.count()

    def options(self, job):
        return {"stages": 1 + next(self.count) % 2}


@found_by("plan of no measurement: expected no exception, got TypeError")
class NeedsAForecast(Apart):
    def options(self, job):
        return {"stages": 1 if job.forecast(Plan(slots=(Slot(roles=("sim",)),))) > 1 else 2}


@found_by("expected no exception, got ValueError: 7 envs")
class RaisesAnotherError(Apart):
    def refuse(self, cluster, job):
        super().refuse(cluster, attrs.evolve(job, num_envs=4 * job.num_envs))
        if job.num_envs % self.sims:
            raise ValueError(f"{job.num_envs} envs")


@found_by("plan on machines of 32 and 64 CPUs, 4 and 2 GPUs")
class AllOnTheFirstMachine(Named):
    def slots(self, cluster, job):
        return [attrs.evolve(s, cpus=cluster.cpus / 6) for s in super().slots(cluster, job)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant) -> None:
    with pytest.raises(CheckFailed) as failed:
        check_placement(mutant())
    assert MUTANTS[mutant] in str(failed.value)


def test_the_double_says_what_it_lacks() -> None:
    """It plans for no machine in particular; that is all that is found of it."""
    with pytest.raises(CheckFailed) as failed:
        check_placement(Slots(SlotsConfig()))
    assert all("DoesNotFit" in text for text in failed.value.findings)
