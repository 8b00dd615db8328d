"""The repository's trainers with one mistake each, which `check_trainer` finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from test_check_trainer import DAGGER, OFF_POLICY, WithHead, plugin_of

from vla_rl.core.catalogue import load
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.trainers import Trainer, UpdateMetrics
from vla_rl.core.types import ActionSource
from vla_rl.plugins.trainers.behaviour_cloning.impl import BehaviourCloning
from vla_rl.plugins.trainers.dagger.impl import Dagger, HGDagger
from vla_rl.plugins.trainers.off_policy.impl import OffPolicy
from vla_rl.plugins.trainers.offline.config import AWR, IQL
from vla_rl.plugins.trainers.offline.impl import Offline
from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient
from vla_rl.testing import CheckFailed, check_trainer
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.trainers.critics import update_target

NEARER = "a policy that comes nearer to what is rewarded, labelled or demonstrated"
LEAVES = "updates, got one that leaves it"
MUTANTS: dict[type[Trainer], str] = {}
KEYS: dict[type[Trainer], tuple[str, dict[str, Any]]] = {
    Dagger: ("dagger", DAGGER),
    HGDagger: ("hg_dagger", DAGGER),
    OffPolicy: ("off_policy", {**OFF_POLICY, "updates_per_step": 1.0}),
    Offline: ("offline", {}),
}
"""Trainer -> its plugin, and keys for a check."""


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


def check(mutant):
    """Check a mutant in its plugin's place."""
    for trainer, (name, keys) in KEYS.items():
        if issubclass(mutant, trainer):
            plugin = load("trainer", name)
            check_trainer(
                dataclasses.replace(plugin, build=mutant),
                plugin.config(**keys, **{k: v for k, v in vars(mutant).items() if k == "algorithm"}),
            )
            return
    check_trainer(plugin_of(mutant))


# -------------------------------------------------------------------------------------------------- policy gradient


def with_fields(data, **fields):
    return attrs.evolve(data, fields={**data.fields, **fields})


@found_by("other weights after other data (advantages)")
class AdvantagesOfOne(PolicyGradient):
    def update(self, data):
        return super().update(with_fields(data, advantages=np.ones_like(data.fields["advantages"])))


@found_by(LEAVES)
class FlippedAdvantages(PolicyGradient):
    def update(self, data):
        return super().update(with_fields(data, advantages=-data.fields["advantages"]))


@found_by("other weights after other data (samples of the second optimiser step)")
class FirstOptimizerStepOnly(PolicyGradient):
    def update(self, data):
        return super().update(attrs.evolve(data, steps=data.steps[:1]))


@found_by("the same gradients however the samples are split")
class DropsTheLastMicroBatch(PolicyGradient):
    def update(self, data):
        steps = [attrs.evolve(step, micro_batches=step.micro_batches[:-1] or step.micro_batches) for step in data.steps]
        return super().update(attrs.evolve(data, steps=steps))


@found_by("the same gradients however the samples are split")
class FirstMicroBatchAgain(PolicyGradient):
    def update(self, data):
        steps = [
            attrs.evolve(step, micro_batches=(step.micro_batches[0],) * len(step.micro_batches)) for step in data.steps
        ]
        return super().update(attrs.evolve(data, steps=steps))


@found_by("other weights after other data (log_probs of the policy that acted)")
class RecordedLogProbsIgnored(PolicyGradient):
    def update(self, data):
        return super().update(with_fields(data, log_probs=np.zeros_like(data.fields["log_probs"])))


@found_by("other weights after other data (valid)")
class AllActionsValid(PolicyGradient):
    def update(self, data):
        return super().update(with_fields(data, valid=np.ones_like(data.fields["valid"])))


@found_by("other weights after other data (the training step, and with it train.lr_schedule)")
class ConstantRate(PolicyGradient):
    def update(self, data):
        return super().update(attrs.evolve(data, step=1))


@found_by("accumulate: expected the gradients of all samples where they come in parts")
class EveryPartIsTheFirst(PolicyGradient):
    def accumulate(self, data):
        super().accumulate(attrs.evolve(data, first=True))


@found_by("restart: expected nothing of the samples before it")
class RestartKeepsGradients(PolicyGradient):
    def accumulate(self, data):
        kept = {name: p.grad for name, p in self._trained.parameters.items() if p.grad is not None}
        super().accumulate(data)
        if data.first:
            for name, gradient in kept.items():
                self._trained.parameters[name].grad.add_(gradient)


@found_by("an optimiser step with the gradients of its samples alone")
class GradientsOfEarlierSteps(PolicyGradient):
    def __init__(self, config, training):
        super().__init__(config, training)
        training.trained.optimizer.zero_grad = lambda set_to_none=True: None


@found_by("a policy that stays as it is while the critic warms up")
class NoCriticWarmUp(PolicyGradient):
    def __init__(self, config, training):
        super().__init__(config, training)
        training.trained.train = attrs.evolve(training.trained.train, critic_warmup_steps=0)


@found_by("other weights after other data (samples of the second optimiser step)")
class SamplesInOrder(PolicyGradient):
    def update(self, data):
        steps = []
        for step in data.steps:
            ends = np.cumsum([len(part) for part in step.micro_batches])
            parts = [np.arange(end - len(part), end) for end, part in zip(ends, step.micro_batches, strict=True)]
            steps.append(attrs.evolve(step, micro_batches=tuple(parts)))
        return super().update(attrs.evolve(data, steps=steps))


# ------------------------------------------------------------------------------------------------ behaviour cloning


def with_steps(data, change):
    return attrs.evolve(data, steps=[change(step) for step in data.steps])


class Rolled(Demonstrations):
    """Demonstrations with the actions of the next sample."""

    def __init__(self, recorded):
        self.recorded = recorded

    def num_samples(self):
        return self.recorded.num_samples()

    def read_samples(self, indices):
        obs, _ = self.recorded.read_samples(indices)
        return obs, self.recorded.read_samples((np.asarray(indices) + 1) % self.num_samples())[1]


@found_by(LEAVES)
class ActionsOfAnotherSample(BehaviourCloning):
    def update(self, data):
        return super().update(attrs.evolve(data, demonstrations=Rolled(data.demonstrations)))


@found_by("other weights after other data (ImitationStep.lr)")
class OwnRate(BehaviourCloning):
    def update(self, data):
        return super().update(with_steps(data, lambda step: attrs.evolve(step, lr=1e-3)))


@found_by("gradients of two ranks that add up")
class DividesByItsOwnSamples(BehaviourCloning):
    def update(self, data):
        return super().update(with_steps(data, lambda step: attrs.evolve(step, total=len(step.indices))))


@found_by("the same gradients however the samples are split")
class FirstMicroBatchOnly(BehaviourCloning):
    def update(self, data):
        size = self._trained.train.micro_batch
        return super().update(with_steps(data, lambda step: attrs.evolve(step, indices=step.indices[:size])))


@found_by("other weights after other data (samples of the second optimiser step)")
class SamplesOfTheFirstStep(BehaviourCloning):
    def update(self, data):
        first = data.steps[0].indices
        return super().update(with_steps(data, lambda step: attrs.evolve(step, indices=first)))


@found_by("other weights after other data (ImitationStep.augment)")
class ImagesAsTheyAre(BehaviourCloning):
    def update(self, data):
        return super().update(with_steps(data, lambda step: attrs.evolve(step, augment=None)))


@found_by(LEAVES)
class Ascends(BehaviourCloning):
    def __init__(self, config, training):
        super().__init__(config, training)
        loss = training.trained.imitation_loss
        training.trained.imitation_loss = lambda *arguments: -loss(*arguments)


@found_by("an optimiser step with the gradients of its samples alone")
class GradientsPileUp(BehaviourCloning):
    def __init__(self, config, training):
        super().__init__(config, training)
        training.trained.optimizer.zero_grad = lambda set_to_none=True: None


@found_by("other weights after other data (samples of the second optimiser step)")
class FirstStepOnly(BehaviourCloning):
    def update(self, data):
        return super().update(attrs.evolve(data, steps=data.steps[:1]))


# ------------------------------------------------------------------------------------------------------- recordings


class OfRewards(Offline):
    """Reads something else than the recorded rewards."""

    def make_steps(self, recorded, *arguments):
        super().make_steps(self.changed(recorded), *arguments)


@found_by("other weights after other data (rewards)")
class RecordedRewardsIgnored(OfRewards):
    algorithm = AWR()

    def changed(self, read):
        return attrs.evolve(read, rewards=np.zeros_like(read.rewards), returns=np.zeros_like(read.returns))


@found_by(LEAVES)
class PrefersLowReturns(OfRewards):
    algorithm = AWR()

    def changed(self, read):
        return attrs.evolve(read, rewards=-read.rewards, returns=-read.returns)


@found_by("other weights after other data (the ends of episodes, by `following`)")
class NothingFollows(OfRewards):
    algorithm = IQL()

    def changed(self, read):
        return attrs.evolve(read, following=np.full_like(read.following, -1))


@found_by("other weights of 'value' after 5 updates")
class UntrainedValues(Offline):
    algorithm = AWR()

    def __init__(self, config, context):
        super().__init__(config, context)
        self._optimizer.step = lambda: None


@found_by("targets: expected other weights of 'q'")
class StandingTargetsOffline(Offline):
    algorithm = IQL()

    def make_steps(self, *arguments):
        kept = {name: tensor.clone() for name, tensor in self._target_q.state_dict().items()}
        super().make_steps(*arguments)
        self._target_q.load_state_dict(kept)


@found_by(LEAVES)
class RewardsOfTheNextSample(OfRewards):
    algorithm = AWR()

    def changed(self, read):
        return attrs.evolve(read, rewards=np.roll(read.rewards, 1), returns=np.roll(read.returns, 1))


# ------------------------------------------------------------------------------------------------------ transitions


class Keeping(OffPolicy):
    """Keeps something else than the new transitions."""

    def _select_kept(self, transitions):
        return attrs.evolve(transitions, **self.changed(transitions))


@found_by("other weights after other data (source, and rewards)")
class RewardsIgnored(Keeping):
    def changed(self, new):
        return {"rewards": np.zeros_like(new.rewards)}


@found_by(LEAVES)
class RewardsFlipped(Keeping):
    def changed(self, new):
        return {"rewards": -new.rewards}


@found_by("other weights after other data (reward of a chunk's last action)")
class FirstRewardOnly(Keeping):
    def changed(self, new):
        return {"rewards": new.rewards * (np.arange(new.rewards.shape[1]) == 0)}


@found_by("other weights after other data (terminated)")
class EndsIgnored(Keeping):
    def changed(self, new):
        return {"terminated": np.zeros_like(new.terminated)}


@found_by("other weights after other data (what follows chunks that did not terminate)")
class EndsInverted(Keeping):
    def changed(self, new):
        return {"terminated": ~new.terminated}


@found_by("other weights after other data (what follows chunks that did not terminate)")
class FollowedByItself(Keeping):
    def changed(self, new):
        return {"following": new.first}


@found_by(LEAVES)
class ActionsOfTheNextChunk(Keeping):
    def changed(self, new):
        return {"actions": np.roll(new.actions, 1, axis=0)}


@found_by("other weights after other data (actions, and the policy's extras)")
class OwnActions(OffPolicy):
    def _make_update(self, number, batch, *arguments):
        # Not in `_batch`: that runs in a separate thread, while this one changes the weights.
        with torch.no_grad():
            actions, _ = self._sample_actions(self._compute_features(batch.obs), torch.zeros(batch.actions.shape))
        return super()._make_update(number, attrs.evolve(batch, actions=actions.numpy()), *arguments)


@found_by("'critics' to move less than the network that it follows")
class CopiedTargets(OffPolicy):
    def _make_update(self, *arguments):
        sums = super()._make_update(*arguments)
        update_target(self._target_critics, self._critics, 1.0)
        return sums


class WithTargets(OffPolicy):
    """Moves targets in its own way."""

    def _make_update(self, *arguments):
        kept = {name: tensor.clone() for name, tensor in self._target_critics.state_dict().items()}
        sums = super()._make_update(*arguments)
        self._target_critics.load_state_dict(kept)
        self.move()
        return sums

    def move(self):
        """Leave them where they are."""


@found_by("targets: expected other weights of 'critics'")
class StandingTargets(WithTargets):
    pass


@found_by("targets: expected other weights of 'critics'")
class CriticsFollowTargets(WithTargets):
    def move(self):
        update_target(self._critics, self._target_critics, self._config.target_rate)


@found_by(NEARER)
class FlippedPolicyLoss(OffPolicy):
    def _actor_passes(self, *arguments):
        sums = super()._actor_passes(*arguments)
        for p in self._trained.parameters.values():
            if p.grad is not None:
                p.grad.neg_()
        return sums


@found_by("modules: expected other weights of 'policy'")
class PolicyNeverTrained(OffPolicy):
    def _is_policy_update(self, number):
        return False


@found_by("modules: expected other weights of 'critics'")
class CriticsNeverTrained(OffPolicy):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._critic_optimizer.step = lambda: None


class HighestOfTheTargets(OffPolicy):
    @torch.no_grad()
    def _compute_targets(self, part, normals, chosen):
        features = self._compute_features(part.following)
        actions, log_probs = self._sample_actions(features, as_tensor(normals, self._device))
        inputs = self._inputs(features, actions)
        values = torch.stack([self._target_critics.critics[i](inputs) for i in chosen]).max(0).values
        values = values - self._entropy_weight() * log_probs.sum((1, 2))
        return as_tensor(part.rewards, self._device) + as_tensor(part.bootstrap, self._device) * values


class PolicyLossTrainsCritics(OffPolicy):
    def _let_critics_learn(self, learn):
        pass

    def _actor_passes(self, *arguments):
        self._critic_optimizer.zero_grad(set_to_none=True)
        sums = super()._actor_passes(*arguments)
        self._critic_optimizer.step()
        return sums


@found_by("other weights after other data (transitions of a later update)")
class FirstTransitionsOnly(OffPolicy):
    def _keep_transitions(self, data):
        super()._keep_transitions(attrs.evolve(data, transitions=None) if self._buffer.transition_count else data)


@found_by("transitions of a later update, where a person acted in every chunk")
class SkipsRolloutsOfAPerson(OffPolicy):
    def update(self, data):
        if (data.transitions.source != ActionSource.POLICY).any(1).all():
            return UpdateMetrics(sums={"loss/critic": 0.0})
        return super().update(data)


@found_by("transitions of a later update, where a person acted in every chunk")
class KeepsNothingOfAPerson(OffPolicy):
    def _select_kept(self, transitions):
        return None if (transitions.source != ActionSource.POLICY).any(1).all() else transitions


@found_by("most of 48 transitions in the batches")
class SameBatchForEver(OffPolicy):
    def _draw_batch(self, number):
        return super()._draw_batch(0)


@found_by("the same weights in each process")
class OrderByHash(PolicyGradient):
    """Deals the samples to its optimiser steps by the hashes of texts."""

    def update(self, data):
        if data.inputs is None:
            return super().update(data)
        order = np.array(sorted(range(len(data.inputs)), key=lambda i: hash(f"sample {data.step}.{i}")))
        steps = [
            attrs.evolve(step, micro_batches=tuple(order[part] for part in step.micro_batches)) for step in data.steps
        ]
        return super().update(attrs.evolve(data, steps=steps))


# ----------------------------------------------------------------------------------------------------------- labels


@found_by("most of 48 transitions in the batches")
class SameLabelsForEver(Dagger):
    def _plan_steps(self, step, samples):
        steps = super()._plan_steps(step, samples)
        draws = np.random.default_rng(0).integers(0, samples, self._config.batch)
        return [attrs.evolve(one, indices=np.sort(draws)) for one in steps]


@found_by("most of 48 transitions in the batches")
class SameTakeoversForEver(HGDagger):
    def _plan_steps(self, step, samples):
        steps = super()._plan_steps(step, samples)
        draws = np.random.default_rng(0).integers(0, samples, self._config.batch)
        return [attrs.evolve(one, indices=np.sort(draws)) for one in steps]


@found_by("other weights after other data (expert_actions)")
class ClonesItself(Dagger):
    def select_labelled(self, transitions):
        chosen, _ = super().select_labelled(transitions)
        return chosen, transitions.actions


@found_by(LEAVES)
class LabelsOfTheNextChunk(Dagger):
    def select_labelled(self, transitions):
        chosen, labels = super().select_labelled(transitions)
        return chosen, np.roll(labels, 1, axis=0)


@found_by(LEAVES)
class FramesThatFollow(Dagger):
    def update(self, data):
        transitions = attrs.evolve(data.transitions, first=data.transitions.following)
        return super().update(attrs.evolve(data, transitions=transitions))


@found_by(LEAVES)
class ClonesThePolicyItself(HGDagger):
    def select_labelled(self, transitions):
        swapped = np.where(transitions.source == ActionSource.POLICY, ActionSource.PERSON, ActionSource.POLICY)
        return super().select_labelled(attrs.evolve(transitions, source=swapped))


@found_by("other weights after other data (source, and rewards)")
class ClonesEverybody(HGDagger):
    def select_labelled(self, transitions):
        return super().select_labelled(
            attrs.evolve(transitions, source=np.full_like(transitions.source, ActionSource.PERSON))
        )


# ----------------------------------------------------------------------------------------------------- housekeeping


@found_by("the same third update after a checkpoint")
class ForgetsItsTemperature(OffPolicy):
    def modules(self):
        return {name: module for name, module in super().modules().items() if name != "temperature"}

    def optimizers(self):
        return {name: part for name, part in super().optimizers().items() if name != "temperature"}


@found_by("metrics that are numbers, got loss/parts of dict")
class MetricOfParts(PolicyGradient):
    def update(self, data):
        metrics = super().update(data)
        return attrs.evolve(metrics, sums={**metrics.sums, "loss/parts": {"policy": 1.0}})


@found_by("the same third update after a checkpoint")
class LoadsNothing(WithHead):
    def load(self, state):
        pass


@found_by("state: expected what a checkpoint can hold")
class StateOfNumPy(WithHead):
    def state(self):
        return {"count": np.array([self.count])}

    def load(self, state):
        self.count = int(state["count"][0])


class Counter:
    """A counter as an object."""

    def __init__(self, count):
        self.count = count


@found_by("state: expected what a checkpoint can hold")
class StateOfObjects(WithHead):
    def state(self):
        return {"count": Counter(self.count)}

    def load(self, state):
        self.count = state["count"].count


@found_by("a heartbeat before each pass")
class NoHeartbeats(PolicyGradient):
    def __init__(self, config, training):
        super().__init__(config, attrs.evolve(training, heartbeat=lambda: None))


@found_by("metrics of names that are free, got ['step']")
class NameOfTheRuntime(PolicyGradient):
    def update(self, data):
        metrics = super().update(data)
        return attrs.evolve(metrics, sums={**metrics.sums, "step": 3.0})


class Bandit(OffPolicy):
    """Learns from each chunk's own reward; it keeps to the contract."""

    def _select_kept(self, transitions):
        return attrs.evolve(transitions, terminated=np.ones_like(transitions.terminated), following=transitions.first)


def test_a_bandit_that_learns_from_the_rewards_of_a_chunk_passes():
    check(Bandit)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant):
    with pytest.raises(CheckFailed) as failed:
        check(mutant)
    assert any(MUTANTS[mutant] in finding for finding in failed.value.findings), failed.value
