"""Algorithms with one mistake each, all of which `check_algorithm` finds; and others, unusual but right, that pass."""

from __future__ import annotations

import attrs
import pytest
import torch
from test_check_algorithm import Critic, Reinforce, findings

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.samples import by_action
from vla_rl.core.types import Advantages, AdvantageScope, Loss, Requirements
from vla_rl.plugins.algorithms.gipo.config import GIPOConfig
from vla_rl.plugins.algorithms.gipo.impl import GIPO
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig, SoftGate
from vla_rl.plugins.algorithms.grpo.impl import GRPO
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.plugins.algorithms.ppo.impl import PPO
from vla_rl.testing import check_algorithm
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled, KLSettings


class Grpo(GRPO):
    def __init__(self):
        super().__init__(GRPOConfig(entropy_coef=0.01))


class Ppo(PPO):
    def __init__(self):
        super().__init__(PPOConfig(advantage="action", entropy_coef=0.01))


class Kl(GRPO):
    def __init__(self):
        super().__init__(GRPOConfig(kl=KLSettings(coef=0.1)))


MUTANTS: dict[type[Algorithm], str] = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


def surrogate(scores, batch, advantages=None, weights=None):
    advantages = batch.advantages if advantages is None else advantages
    weights = batch.weights if weights is None else weights
    total = -(scores.log_probs.sum(-1) * advantages * weights).sum()
    return Loss(total=total, metrics={"loss/policy": total.detach()})


# ---------------------------------------------------------------------------------------------------- advantages


@found_by("the same for the same rollout, got others the second time")
class RandomAdvantages(Grpo):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        return attrs.evolve(made, advantages=torch.randn(made.advantages.shape) * (made.advantages != 0))


@found_by("more weight * advantage for a trajectory that succeeds")
class SeededAdvantages(Reinforce):
    def advantages(self, rollout):
        draws = torch.Generator().manual_seed(0)
        valid = rollout.valid.float()
        return Advantages(advantages=torch.randn(valid.shape, generator=draws) * valid, weights=valid)


@found_by("the same for the same rollout")
class NoisyAdvantages(Ppo):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        return attrs.evolve(made, advantages=made.advantages * (1 + 0.01 * torch.rand(())))


@found_by("the same for the same rollout")
class RunningBaseline(Reinforce):
    mean = 0.0

    def advantages(self, rollout):
        score, valid = rollout.rewards.sum((0, 2)), rollout.valid.float()
        self.mean = 0.9 * self.mean + 0.1 * float(score.mean())
        return Advantages(advantages=(score - self.mean)[None, :, None] * valid, weights=valid)


@found_by("more weight * advantage for a trajectory that succeeds")
class FlippedAdvantages(Grpo):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        return attrs.evolve(made, advantages=-made.advantages)


@found_by("more weight * advantage for a trajectory that succeeds")
class ConstantAdvantages(Reinforce):
    def advantages(self, rollout):
        valid = rollout.valid.float()
        return Advantages(advantages=0.5 * valid, weights=valid)


@found_by("more weight * advantage for a trajectory that succeeds")
class ShiftedColumns(Grpo):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        rolled = made.advantages.roll(1, 1)
        return attrs.evolve(made, advantages=torch.where(rollout.samples, rolled, torch.zeros(())))


@found_by("0 in a group whose members are all alike")
class BaselineOfTheBatch(Grpo):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        scores = rollout.rewards.sum((0, 2))
        relative = (scores - scores.mean()).expand(rollout.samples.shape)
        return attrs.evolve(made, advantages=relative * rollout.samples)


@found_by("the same for a trajectory wherever it stands")
class GroupsByPosition(Grpo):
    def advantages(self, rollout):
        size = 4 if rollout.valid.shape[1] % 4 == 0 else 1
        return super().advantages(rollout.evolve(groups=torch.arange(rollout.valid.shape[1]) // size))


@found_by("no use of groups, which `needs` lacks")
class UndeclaredGroups(Grpo):
    def __init__(self):
        super().__init__()
        self.needs = Requirements()


@found_by("as much credit for actions up to a reward as for those after it")
class TimeReversed(Ppo):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        return attrs.evolve(made, advantages=made.advantages.flip(0) * rollout.valid)


@found_by("a higher advantage of an action that is paid more")
class OneStepEarly(Ppo):
    def advantages(self, rollout):
        made = super().advantages(rollout.evolve(rewards=rollout.rewards.roll(-1, 0)))
        return attrs.evolve(made, returns=super().advantages(rollout).returns)


@found_by("targets that know of later rewards only")
class ReturnsFromTheStart(Ppo):
    def advantages(self, rollout):
        return attrs.evolve(super().advantages(rollout), returns=rollout.rewards.cumsum(0) * rollout.valid)


@found_by("a higher target where more is paid")
class ReturnsWithoutRewards(Ppo):
    def advantages(self, rollout):
        return attrs.evolve(super().advantages(rollout), returns=rollout.values * rollout.valid)


@found_by("no higher advantage where the critic expected more")
class AddedBaseline(Ppo):
    def advantages(self, rollout):
        return super().advantages(rollout.evolve(values=-rollout.values))


@found_by("nothing of the next episode before the end of one (terminated)")
class UncutAtTerminations(Ppo):
    def advantages(self, rollout):
        return super().advantages(rollout.evolve(terminated=torch.zeros_like(rollout.terminated)))


@found_by("nothing of the next episode before the end of one (truncated)")
class UncutAtTruncations(Ppo):
    def advantages(self, rollout):
        return super().advantages(rollout.evolve(truncated=torch.zeros_like(rollout.truncated)))


@found_by("no value of what follows a termination")
class TerminationsAsTruncations(Ppo):
    def advantages(self, rollout):
        ended = rollout.terminated | rollout.truncated
        return super().advantages(rollout.evolve(terminated=torch.zeros_like(ended), truncated=ended))


@found_by("the same whatever stands where `valid` is False")
class MeanOverAllValues(Critic):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        return attrs.evolve(made, advantages=made.advantages - rollout.values.mean() * rollout.valid)


@found_by("advantages: advantages: expected the same for a group whatever others there are")
class NormalisedInSecret(Ppo):
    def __init__(self):
        super().__init__()
        self.advantage_scope = AdvantageScope.GROUP


@found_by("select: expected the same for a group whatever others there are")
class TopGroups(Grpo):
    def select(self, rollout):
        scores = rollout.rewards.sum((0, 2))
        return super().select(rollout) & (scores.view(-1, 4).mean(1) >= scores.mean()).repeat_interleave(4)


@found_by("advantages: weights: expected the same for a group whatever others there are")
class RelativeLengths(GRPO):
    def __init__(self):
        super().__init__(GRPOConfig(aggregation="rlinf"))
        self.advantage_scope = AdvantageScope.GROUP


@found_by("finite numbers")
class DividedByTheStd(Reinforce):
    def advantages(self, rollout):
        score, valid = rollout.rewards.sum((0, 2)), rollout.valid.float()
        return Advantages(advantages=((score - score.mean()) / score.std())[None, :, None] * valid, weights=valid)


@found_by("trajectories of groups in which some succeed and some fail, got none of them")
class InvertedFilter(Grpo):
    def select(self, rollout):
        return ~super().select(rollout)


@found_by("the same choice for the same rollout")
class RandomFilter(Grpo):
    def select(self, rollout):
        return torch.rand(rollout.valid.shape[1]) < 0.5


@found_by("shape_rewards: expected `success` unchanged")
class ShapedSuccess(Reinforce):
    def shape_rewards(self, rollout):
        return rollout.evolve(success=~rollout.success)


@found_by("more weight * advantage for a trajectory that succeeds")
class PenalisedSuccess(Reinforce):
    def shape_rewards(self, rollout):
        return rollout.evolve(rewards=-rollout.rewards)


@found_by("advantages: expected metrics of names that are free, got ['rollout/score']")
class TakenName(Reinforce):
    def advantages(self, rollout):
        return attrs.evolve(super().advantages(rollout), metrics={"rollout/score": 1.0})


# ------------------------------------------------------------------------------------------------------- old data


@found_by("older samples that count as new ones do")
class DropsOldSamples(Reinforce):
    def loss(self, scores, batch):
        return surrogate(scores, batch, weights=batch.weights * (batch.lag == 0)[:, None])


@found_by("older samples that count as new ones do")
class DropsVeryOldSamples(Grpo):
    def loss(self, scores, batch):
        young = (batch.lag <= 4).reshape(-1, *[1] * (batch.weights.dim() - 1))
        return super().loss(scores, attrs.evolve(batch, weights=batch.weights * young))


@found_by("samples of the last version that still count, got none in ['loss']")
class DropsOldSamplesOffPolicy(GIPO):
    def __init__(self):
        super().__init__(GIPOConfig())

    def loss(self, scores, batch):
        young = (batch.lag == 0).reshape(-1, *[1] * (batch.weights.dim() - 1))
        return super().loss(scores, attrs.evolve(batch, weights=batch.weights * young))


@found_by("older samples that count as new ones do")
class SelectsNewTrajectories(Reinforce):
    def select(self, rollout):
        return super().select(rollout) & (rollout.versions >= rollout.step - 1).all(0)


@found_by("older samples that count as new ones do")
class WeighsNewChunks(Reinforce):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        young = (rollout.versions >= rollout.step - 1)[..., None]
        return attrs.evolve(made, weights=made.weights * young)


# ----------------------------------------------------------------------------------------------------------- loss


@found_by("a gradient in log_probs that goes with each sample's weight")
class IgnoredWeights(Reinforce):
    def loss(self, scores, batch):
        return surrogate(scores, batch, weights=batch.valid.float() / 100)


@found_by("a gradient in log_probs that goes with each sample's weight")
class SquaredWeights(Reinforce):
    def loss(self, scores, batch):
        return surrogate(scores, batch, weights=batch.weights.square())


@found_by("a gradient in log_probs that goes with each sample's weight")
class NormalisedWeights(Reinforce):
    def loss(self, scores, batch):
        return surrogate(scores, batch, weights=batch.weights / batch.weights.sum())


@found_by("the same gradient from micro-batches")
class MeanWeight(Reinforce):
    def loss(self, scores, batch):
        return surrogate(scores, batch, weights=batch.weights.mean() * batch.valid)


@found_by("a step at the old policy that makes actions of positive advantage likelier")
class FlippedLoss(Reinforce):
    def loss(self, scores, batch):
        return surrogate(scores, batch, -batch.advantages)


@found_by("a gradient in log_probs that goes with the advantage")
class IgnoredAdvantages(Grpo):
    def loss(self, scores, batch):
        return super().loss(scores, attrs.evolve(batch, advantages=(batch.advantages != 0).float()))


@found_by("no gradient in log_probs from advantages of 0")
class LiftedAdvantages(Grpo):
    def loss(self, scores, batch):
        return super().loss(scores, attrs.evolve(batch, advantages=batch.advantages + 0.5))


@found_by("a gradient in log_probs that goes with the advantage")
class AbsoluteAdvantages(Grpo):
    def loss(self, scores, batch):
        return super().loss(scores, attrs.evolve(batch, advantages=batch.advantages.abs()))


@found_by("a step at the old policy")
class InvertedRatio(Ppo):
    def loss(self, scores, batch):
        mirrored = attrs.evolve(scores, log_probs=2 * batch.log_probs - scores.log_probs)
        return super().loss(mirrored, batch)


@found_by("the same gradient from micro-batches")
class NormalisedInTheLoss(Grpo):
    def loss(self, scores, batch):
        advantages = (batch.advantages - batch.advantages.mean()) * (batch.advantages != 0)
        return super().loss(scores, attrs.evolve(batch, advantages=advantages))


@found_by("an action's advantage on its own log-probs")
class ActionsTurned(Critic):
    def loss(self, scores, batch):
        turned = attrs.evolve(
            scores,
            log_probs=torch.where(batch.valid.all(-1)[:, None, None], scores.log_probs.flip(1), scores.log_probs),
        )
        return super().loss(turned, batch)


@found_by("a loss that does not rise with the entropy")
class PenalisedEntropy(Ppo):
    def loss(self, scores, batch):
        return super().loss(attrs.evolve(scores, entropy=-scores.entropy), batch)


@found_by("a total of 0 where all weights are 0")
class ConstantPart(Reinforce):
    def loss(self, scores, batch):
        loss = super().loss(scores, batch)
        return attrs.evolve(loss, total=loss.total + 0.01 * len(batch.valid))


@found_by("the same loss for the same batch")
class RandomLoss(Reinforce):
    def loss(self, scores, batch):
        return surrogate(scores, batch, weights=batch.weights * torch.rand(()))


@found_by("`advantages` of its argument unchanged")
class WritesIntoTheBatch(Reinforce):
    def loss(self, scores, batch):
        batch.advantages.clamp_(-0.1, 0.1)
        return super().loss(scores, batch)


@found_by("a step of the values towards batch.returns")
class FlippedCritic(Critic):
    def loss(self, scores, batch):
        base = Reinforce.loss(self, scores, batch)
        return attrs.evolve(base, total=base.total - ((scores.values - batch.returns) ** 2 * batch.value_weights).sum())


@found_by("a step of the values towards batch.returns")
class CriticOfAdvantages(Ppo):
    def loss(self, scores, batch):
        return super().loss(scores, attrs.evolve(batch, returns=batch.advantages))


@found_by("value_weights in the value loss alone")
class CriticOfPolicyWeights(Critic):
    def loss(self, scores, batch):
        return super().loss(scores, attrs.evolve(batch, value_weights=batch.weights))


@found_by("a pull towards the reference policy, as `needs` has it, got the opposite")
class PushedFromTheReference(Kl):
    def loss(self, scores, batch):
        mirrored = 2 * batch.log_probs - batch.reference_log_probs
        return super().loss(scores, attrs.evolve(batch, reference_log_probs=mirrored))


@found_by("batch.reference_log_probs is not used")
class UnusedReference(Grpo):
    needs = Requirements(groups=True, reference=True)

    def __init__(self):
        super().__init__()
        self.needs = Requirements(groups=True, reference=True)


@found_by("metrics of names that are free, got ['loss/total']")
class ReportsTheTotal(Reinforce):
    def loss(self, scores, batch):
        loss = super().loss(scores, batch)
        return attrs.evolve(loss, metrics={**loss.metrics, "loss/total": loss.total.detach()})


@found_by("metrics without gradient")
class MetricWithAGraph(Reinforce):
    def loss(self, scores, batch):
        loss = super().loss(scores, batch)
        return attrs.evolve(loss, metrics={"loss/policy": loss.total})


@found_by("each metric in one of metrics, maxima, statistics")
class MetricTwice(Reinforce):
    def loss(self, scores, batch):
        loss = super().loss(scores, batch)
        return attrs.evolve(loss, maxima={"loss/policy": scores.log_probs.detach().max()})


@found_by("needs: expected values with recomputed_values, got no values; write `needs = Requirements(values=True, ")
class RecomputedValuesAlone(Reinforce):
    needs = Requirements(recomputed_values=True)


@found_by("`rewards` of its argument unchanged")
class ScalesTheRolloutInPlace(Grpo):
    def advantages(self, rollout):
        rollout.rewards.mul_(2)
        return super().advantages(rollout)


@found_by("metric 'loss/spread': expected a finite number")
class MetricOfNothing(Reinforce):
    def loss(self, scores, batch):
        loss = super().loss(scores, batch)
        nothing = torch.zeros(0).mean()
        return attrs.evolve(loss, metrics={**loss.metrics, "loss/spread": nothing})


@found_by("select: expected bool [12], got int64")
class SelectsByNumber(Grpo):
    def select(self, rollout):
        return super().select(rollout).nonzero().flatten()


@found_by("a scalar total, got [1]")
class TotalOfOneNumber(Reinforce):
    def loss(self, scores, batch):
        loss = super().loss(scores, batch)
        return attrs.evolve(loss, total=loss.total[None])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant) -> None:
    assert MUTANTS[mutant] in findings(mutant())


# ------------------------------------------------------------------------------------------- unusual, and right


class CloningOfSuccesses(Algorithm):
    """Filtered behaviour cloning: no advantage is below 0, and the loss looks at weights alone."""

    def advantages(self, rollout):
        valid = rollout.valid.float()
        return Advantages(advantages=valid, weights=valid * rollout.success[None, :, None] + 1e-3 * valid)

    def loss(self, scores, batch):
        return surrogate(scores, batch, torch.ones_like(batch.advantages))


class Ranks(Reinforce):
    """Scores are replaced by their place among all."""

    def advantages(self, rollout):
        score, valid = rollout.rewards.sum((0, 2)), rollout.valid.float()
        rank = (score[:, None] > score[None]).float().mean(1) - (score[:, None] < score[None]).float().mean(1)
        return Advantages(advantages=rank[None, :, None] * valid, weights=valid)


class RewardToGo(Reinforce):
    def advantages(self, rollout):
        flat = by_action(rollout.rewards)
        togo = flat.flip(0).cumsum(0).flip(0).reshape(*rollout.rewards.permute(0, 2, 1).shape).permute(0, 2, 1)
        valid = rollout.valid.float()
        return Advantages(advantages=(togo - 0.5) * valid, weights=valid)


class SquaredTarget(Reinforce):
    """A regression of the log-ratio on the advantage."""

    def loss(self, scores, batch):
        ratio = scores.log_probs.sum(-1) - batch.log_probs.sum(-1)
        total = ((ratio.clamp(-5, 5) - batch.advantages).square() * batch.weights).sum()
        return Loss(total=total, metrics={"loss/policy": total.detach()})


class GroupStandardised(Grpo):
    """A group's mean, and the deviation of the whole batch."""

    def __init__(self):
        super().__init__()
        self.advantage_scope = AdvantageScope.STEP

    def advantages(self, rollout):
        made = GRPO(GRPOConfig(normalize_by_std=None)).advantages(rollout)
        return attrs.evolve(made, advantages=made.advantages / (made.advantages[rollout.samples].std() + 1e-6))


SETTINGS = [
    PPO(PPOConfig(lam=0.0, normalize_advantages=None)),
    PPO(PPOConfig(gamma=1.0, lam=1.0, time_limit="terminal", value_clip=None, huber_delta=None)),
    PPO(PPOConfig(aggregation="rlinf", log_prob="chunk", kl=KLSettings(coef=0.2, estimator="k1"))),
    GIPO(GIPOConfig(sigma=0.1, kl=KLSettings(coef=0.1, estimator="k2"), aggregation="trajectory-mean")),
    GRPO(GRPOConfig(baseline="leave-one-out", normalize_by_std=None, filter_truncated=True, kl=KLSettings(coef=0.1))),
    GRPO(GRPOConfig(normalize_by_std="step")),
    GRPO(GRPOConfig(soft_gate=SoftGate(), log_prob="chunk", correction=Decoupled())),
]


@pytest.mark.parametrize("algorithm", [CloningOfSuccesses, Ranks, RewardToGo, SquaredTarget, GroupStandardised])
def test_unusual_algorithms_pass(algorithm) -> None:
    check_algorithm(algorithm())


@pytest.mark.parametrize("algorithm", SETTINGS, ids=lambda algorithm: type(algorithm).__name__)
def test_settings_far_from_the_defaults_pass(algorithm) -> None:
    check_algorithm(algorithm)
