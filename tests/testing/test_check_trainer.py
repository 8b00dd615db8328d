"""Trainers with one mistake each, all of which `check_trainer` finds; and the repository's own, which pass."""

from __future__ import annotations

import copy
import dataclasses

import attrs
import pytest
import torch
from attrs import frozen
from torch import nn

from vla_rl.core.catalogue import load
from vla_rl.core.declarations import TrainerPlugin, TrainingData
from vla_rl.core.trainers import UpdateMetrics
from vla_rl.plugins.trainers.behaviour_cloning.impl import BehaviourCloning
from vla_rl.plugins.trainers.dagger.impl import Dagger, HGDagger
from vla_rl.plugins.trainers.off_policy.impl import OffPolicy
from vla_rl.plugins.trainers.offline.config import AWR
from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient
from vla_rl.testing import CheckFailed, check_trainer
from vla_rl.toolkit.trainers.parallel import SingleRank

MUTANTS = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


@frozen
class NoKeys:
    """Settings of the trainers below."""


def plugin_of(trainer):
    data = TrainingData.DEMONSTRATIONS if issubclass(trainer, BehaviourCloning) else TrainingData.TRAJECTORIES
    return TrainerPlugin(config=NoKeys, build=trainer, summary="test", trains_on=data)


class WithHead(PolicyGradient):
    """A trainer with its own network, optimiser, target and counter; it keeps to the contract."""

    def __init__(self, config, training):
        super().__init__(config, training)
        self.head = nn.Linear(3, 1)
        with torch.no_grad():
            for p in self.head.parameters():
                p.fill_(0.5)
        self.target = copy.deepcopy(self.head)
        self.adam = torch.optim.Adam(self.head.parameters(), lr=1e-2)
        self.count = 0

    def modules(self):
        return {**super().modules(), "head": self.head}

    def optimizers(self):
        return {**super().optimizers(), "head": self.adam}

    def targets(self):
        return {"head": self.target}

    def state(self):
        return {"count": self.count}

    def load(self, state):
        self.count = state["count"]

    def update(self, data):
        metrics = super().update(data)
        self.count += 1
        self.adam.zero_grad()
        goal = self.target(torch.ones(1, 3)).detach() + self.count
        loss = (self.head(torch.ones(1, 3)) - goal).square().sum()
        loss.backward()
        self.adam.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.head.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return metrics


@found_by("'policy' for the policy's own module")
class AnotherPolicy(PolicyGradient):
    def modules(self):
        return {"policy": copy.deepcopy(self._trained.model.module)}


@found_by("parameters of `modules`")
class HiddenNetwork(WithHead):
    def modules(self):
        return PolicyGradient.modules(self)


@found_by("networks that no optimiser trains")
class TrainedTarget(WithHead):
    def targets(self):
        return {"head": self.head}


@found_by("float32 weights in optimisers and targets, where small steps add up, got torch.bfloat16")
class NarrowTarget(WithHead):
    def __init__(self, config, training):
        super().__init__(config, training)
        self.target.bfloat16()

    def update(self, data):
        self.target.float()
        metrics = super().update(data)
        self.target.bfloat16()
        return metrics


@found_by("UpdateMetrics, got dict")
class PlainMetrics(PolicyGradient):
    def update(self, data):
        return dict(super().update(data).sums)


@found_by("finite metrics, got loss/spread")
class InfiniteMetric(PolicyGradient):
    def update(self, data):
        metrics = super().update(data)
        return attrs.evolve(metrics, sums={**metrics.sums, "loss/spread": float("nan")})


@found_by("other weights than before")
class Idle(PolicyGradient):
    def update(self, data):
        return UpdateMetrics(sums={"loss/total": 0.0})


@found_by("got a numpy.ndarray at ['state']['mean']")
class ArrayInState(WithHead):
    def state(self):
        return {**super().state(), "mean": torch.zeros(2).numpy()}


@found_by("data that stay as they are")
class InPlace(PolicyGradient):
    def update(self, data):
        data.fields["advantages"][:] = data.fields["advantages"] / 2
        return super().update(data)


@found_by("whatever the global generators did before")
class Noisy(PolicyGradient):
    def update(self, data):
        metrics = super().update(data)
        with torch.no_grad():
            for p in self._trained.parameters.values():
                p.add_(1e-3 * torch.randn_like(p))
        return metrics


@found_by("global random generators left alone")
class Seeding(PolicyGradient):
    def update(self, data):
        torch.manual_seed(0)
        return super().update(data)


@found_by("however the samples are split into micro-batches")
class MeanOfMicroBatches(PolicyGradient):
    def update(self, data):
        steps = [attrs.evolve(step, divisor=len(step.micro_batches[0])) for step in data.steps]
        return super().update(attrs.evolve(data, steps=steps))


@found_by("gradients of two ranks that add up")
class MeanOfRanks(PolicyGradient):
    def update(self, data):
        count = sum(len(batch) for batch in data.steps[0].micro_batches)
        return super().update(attrs.evolve(data, steps=[attrs.evolve(step, divisor=count) for step in data.steps]))


@found_by("gradients that are added up over the ranks")
class Alone(PolicyGradient):
    def update(self, data):
        self._trained.strategy = SingleRank()
        return super().update(data)


@found_by("the same third update after a checkpoint")
class ForgetsCount(WithHead):
    def state(self):
        return {}


@found_by("the same third update after a checkpoint")
class ForgetsTarget(WithHead):
    def targets(self):
        return {}


@found_by("the same third update after a checkpoint")
class ForgetsOptimizer(WithHead):
    def optimizers(self):
        return PolicyGradient.optimizers(self)


@found_by("'loss/imitation', the sum of the losses")
class Unnamed(BehaviourCloning):
    def update(self, data):
        return attrs.evolve(super().update(data), sums={})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant):
    with pytest.raises(CheckFailed) as failed:
        check_trainer(plugin_of(mutant))
    assert any(MUTANTS[mutant] in finding for finding in failed.value.findings), failed.value


@pytest.mark.parametrize("name", ["policy_gradient", "behaviour_cloning", "offline"])
def test_own_trainers_pass(name):
    check_trainer(load("trainer", name))


def test_offline_passes_with_each_algorithm():
    plugin = load("trainer", "offline")
    check_trainer(plugin, plugin.config(algorithm=AWR(), features="frozen"))


def test_a_trainer_with_its_own_networks_passes():
    check_trainer(plugin_of(WithHead))


def test_trainers_of_windows_are_checked_elsewhere():
    with pytest.raises(ValueError, match="check_world_model"):
        check_trainer(load("trainer", "world_model"))


# ------------------------------------------------------------------------------------------- trainers of transitions

OFF_POLICY = {"min_data": 8, "batch": 8, "hidden": (8,), "updates_per_step": 2.0}


class ForgetsItsTransitions(OffPolicy):
    def state(self):
        return {"updates": self._updates}

    def load(self, state):
        self._updates = state["updates"]


class DrawsFromTorch(OffPolicy):
    def _draw_batch(self, number):
        return super()._draw_batch(number).take(torch.randint(0, 8, (8,)).numpy())


class DividesByTheMicroBatch(OffPolicy):
    def _actor_passes(self, features, normals, executed):
        for part, rows in zip(features, self._micro_batches(len(normals)), strict=True):
            sums = super()._actor_passes([part], normals[rows], executed[rows])
        return sums


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (ForgetsItsTransitions, "the same third update after a checkpoint as without one"),
        (DrawsFromTorch, "the global random generators left alone"),
        (DividesByTheMicroBatch, "the same gradients however the samples are split into micro-batches"),
    ],
)
def test_a_mistake_with_transitions_is_found(mutant, text):
    plugin = load("trainer", "off_policy")
    with pytest.raises(CheckFailed) as failed:
        check_trainer(dataclasses.replace(plugin, build=mutant), plugin.config(**OFF_POLICY))
    assert any(text in finding for finding in failed.value.findings), failed.value


@pytest.mark.parametrize("keys", [{}, {"critics": 4, "actor_value": "mean", "temperature": 0.1, "features": "frozen"}])
def test_off_policy_passes(keys):
    plugin = load("trainer", "off_policy")
    check_trainer(plugin, plugin.config(**{**OFF_POLICY, **keys}))


# ------------------------------------------------------------------------------------------ trainers that aggregate

DAGGER = {"updates": 2, "batch": 8}


class ForgetsItsLabels(Dagger):
    def load(self, state):
        self._updates = state["updates"]


class CountsFromOne(Dagger):
    def load(self, state):
        self._labelled.load(state["labelled"])


class DrawsSamplesFromTorch(HGDagger):
    def _plan_steps(self, step, samples):
        draws = torch.randint(0, samples, (8,)).numpy()
        return [attrs.evolve(one, indices=draws) for one in super()._plan_steps(step, samples)]


class ClonesHalfOfABatch(Dagger):
    def _plan_steps(self, step, samples):
        return [attrs.evolve(one, total=self._trained.train.micro_batch) for one in super()._plan_steps(step, samples)]


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (ForgetsItsLabels, "the same third update after a checkpoint as without one"),
        (CountsFromOne, "the same third update after a checkpoint as without one"),
        (DrawsSamplesFromTorch, "the global random generators left alone"),
        (ClonesHalfOfABatch, "the same gradients however the samples are split into micro-batches"),
    ],
)
def test_a_mistake_with_labels_is_found(mutant, text):
    plugin = load("trainer", "hg_dagger" if issubclass(mutant, HGDagger) else "dagger")
    with pytest.raises(CheckFailed) as failed:
        check_trainer(dataclasses.replace(plugin, build=mutant), plugin.config(**DAGGER))
    assert any(text in finding for finding in failed.value.findings), failed.value


@pytest.mark.parametrize("name", ["dagger", "hg_dagger"])
def test_trainers_that_aggregate_pass(name):
    plugin = load("trainer", name)
    check_trainer(plugin, plugin.config(**DAGGER))
    check_trainer(plugin, plugin.config(**DAGGER, capacity=5))
