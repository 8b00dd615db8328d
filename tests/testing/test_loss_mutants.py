"""Textbook algorithms, written as an author would write them, which `check_algorithm` passes; and with one mistake
each, which it finds: clips, signs, masks, bootstraps, and what they say of old data."""

from __future__ import annotations

import attrs
import pytest
import torch

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Loss, Requirements
from vla_rl.testing import CheckFailed, check_algorithm

MUTANTS: dict[type[Algorithm], str] = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


# ---------------------------------------------------------------------------------------------------- right ones


class Reinforce(Algorithm):
    def advantages(self, rollout):
        valid = rollout.valid.float()
        returns = rollout.rewards.sum((0, 2))
        return Advantages(advantages=(returns - returns.mean())[None, :, None] * valid, weights=valid)

    def loss(self, scores, batch):
        return done(-(scores.log_probs.sum(-1) * batch.advantages * batch.weights).sum())


def done(total, policy=None):
    return Loss(total=total, metrics={"loss/policy": (total if policy is None else policy).detach()})


class Ppo(Algorithm):
    """Advantages by GAE over chunks; a ratio whose exponential is not bounded."""

    needs = Requirements(values=True)
    gamma, lam, low, high, entropy_coef = 0.99, 0.95, 0.2, 0.2, 0.01

    def next_value(self, rollout, t):
        ended = (rollout.terminated | rollout.truncated)[t].any(-1)
        last = t == len(rollout.values) - 1
        following = (
            rollout.next_values[t] if last else torch.where(ended, rollout.next_values[t], rollout.values[t + 1])
        )
        return following * ~rollout.terminated[t].any(-1), ended

    def gae(self, rollout):
        rewards, values = rollout.rewards.sum(-1), rollout.values
        advantages, carried = torch.zeros_like(values), torch.zeros_like(values[0])
        for t in reversed(range(len(values))):
            following, ended = self.next_value(rollout, t)
            carried = rewards[t] + self.gamma * following - values[t] + self.gamma * self.lam * carried * ~ended
            advantages[t] = carried
        return torch.where(rollout.samples, advantages, 0.0)

    def targets(self, advantages, rollout):
        return torch.where(rollout.samples, advantages + rollout.values, 0.0)

    def normalised(self, advantages, rollout):
        counted = advantages[rollout.samples]
        spread = counted.std() if len(counted) > 1 else torch.zeros(())
        return torch.where(rollout.samples, (advantages - counted.mean()) / (spread + 1e-8), 0.0)

    def advantages(self, rollout):
        advantages, weights = self.gae(rollout), rollout.samples.float()
        return Advantages(
            advantages=self.normalised(advantages, rollout),
            weights=weights,
            returns=self.targets(advantages, rollout),
            value_weights=weights,
        )

    def ratio(self, scores, batch):
        valid = batch.valid[..., None]
        return (torch.where(valid, scores.log_probs - batch.log_probs, 0.0)).sum((1, 2)).exp()

    def surrogate(self, ratio, advantages):
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)

    def value_loss(self, values, batch):
        clipped = batch.values + (values - batch.values).clamp(-0.2, 0.2)
        return 0.5 * torch.maximum((values - batch.returns) ** 2, (clipped - batch.returns) ** 2)

    def loss(self, scores, batch):
        policy = (self.surrogate(self.ratio(scores, batch), batch.advantages) * batch.weights).sum()
        value = (self.value_loss(scores.values, batch) * batch.value_weights).sum()
        entropy = ((scores.entropy * batch.valid[..., None]).sum((1, 2)) * batch.weights).sum()
        return done(policy + 0.5 * value - self.entropy_coef * entropy, policy)


class A2c(Ppo):
    """Without a ratio, with n-step returns."""

    lam = 1.0

    def loss(self, scores, batch):
        valid = batch.valid[..., None]
        log_probs = (scores.log_probs * valid).sum((1, 2))
        policy = -(log_probs * batch.advantages * batch.weights).sum()
        value = (0.5 * (scores.values - batch.returns) ** 2 * batch.value_weights).sum()
        return done(policy + value, policy)


class Grpo(Algorithm):
    """A ratio of each token, and a KL term."""

    needs = Requirements(groups=True, reference=True)
    low, high, kl_coef = 0.2, 0.28, 0.05

    def centred(self, returns, same):
        mean = same @ returns / same.sum(1)
        deviation = ((same * (returns[None] - mean[:, None]) ** 2).sum(1) / same.sum(1)).sqrt()
        return (returns - mean) / (deviation + 1e-6)

    def advantages(self, rollout):
        valid, returns = rollout.valid.float(), rollout.rewards.sum((0, 2))
        same = (rollout.groups[:, None] == rollout.groups).float()
        return Advantages(advantages=self.centred(returns, same)[None, :, None] * valid, weights=valid)

    def log_ratio(self, scores, batch):
        return scores.log_probs - batch.log_probs

    def surrogate(self, log_ratio, advantages):
        ratio = log_ratio.exp()
        return -torch.min(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)

    def divergence(self, scores, batch):
        d = batch.reference_log_probs - scores.log_probs
        return d.exp() - d - 1

    def loss(self, scores, batch):
        advantages, weights = batch.advantages[..., None], batch.weights[..., None]
        policy = (self.surrogate(self.log_ratio(scores, batch), advantages) * weights).sum()
        return done(policy + self.kl_coef * (self.divergence(scores, batch) * weights).sum(), policy)


class Impala(Reinforce):
    """Old data are weighed by a truncated ratio."""

    off_policy = True

    def loss(self, scores, batch):
        log_probs = scores.log_probs.sum(-1)
        weight = (log_probs.detach() - batch.log_probs.sum(-1)).exp().clamp(max=2.0)
        return done(-(weight * log_probs * batch.advantages * batch.weights).sum())


class Decoupled(Grpo):
    """PPO around the policy before the step, weighed by that policy's ratio to what acted."""

    needs = Requirements(groups=True, proximal_log_probs=True)
    off_policy = True
    kl_coef = 0.0

    def log_ratio(self, scores, batch):
        return scores.log_probs - batch.proximal_log_probs

    def divergence(self, scores, batch):
        return torch.zeros_like(scores.log_probs)

    def loss(self, scores, batch):
        advantages, weights = batch.advantages[..., None], batch.weights[..., None]
        behaviour = (batch.proximal_log_probs - batch.log_probs).exp()
        return done((behaviour * self.surrogate(self.log_ratio(scores, batch), advantages) * weights).sum())


class Cispo(Grpo):
    """The ratio is clipped and has no gradient, so that each token keeps one."""

    def loss(self, scores, batch):
        advantages, weights = batch.advantages[..., None], batch.weights[..., None]
        ratio = (scores.log_probs - batch.log_probs).exp().clamp(max=1.28).detach()
        policy = -(ratio * scores.log_probs * advantages * weights).sum()
        return done(policy + self.kl_coef * (self.divergence(scores, batch) * weights).sum(), policy)


class Gspo(Grpo):
    """One ratio for all tokens of a chunk, their geometric mean, and so one advantage and one weight a chunk."""

    needs = Requirements(groups=True)

    def advantages(self, rollout):
        returns, weights = rollout.rewards.sum((0, 2)), rollout.samples.float()
        same = (rollout.groups[:, None] == rollout.groups).float()
        return Advantages(advantages=self.centred(returns, same)[None] * weights, weights=weights)

    def log_ratio(self, scores, batch):
        tokens = batch.valid.sum(-1).clamp(min=1) * scores.log_probs.shape[-1]
        return torch.where(batch.valid[..., None], super().log_ratio(scores, batch), 0.0).sum((1, 2)) / tokens

    def loss(self, scores, batch):
        return done((self.surrogate(self.log_ratio(scores, batch), batch.advantages) * batch.weights).sum())


class Aged(Reinforce):
    """Old data count less, by their age alone."""

    off_policy = True

    def loss(self, scores, batch):
        weights = batch.weights * 0.5 ** batch.lag.float()[:, None]
        return done(-(scores.log_probs.sum(-1) * batch.advantages * weights).sum())


class Spo(Ppo):
    """A quadratic penalty in place of the clip, which pulls back what went too far."""

    def surrogate(self, ratio, advantages):
        return -ratio * advantages + advantages.abs() / (2 * self.low) * (ratio - 1) ** 2


class WeightedRegression(Ppo):
    """All that was done is made likelier, by exp(A)."""

    def loss(self, scores, batch):
        log_probs = (scores.log_probs * batch.valid[..., None]).sum((1, 2))
        policy = -(log_probs * batch.advantages.clamp(max=3).exp() * batch.weights).sum()
        return done(policy + (self.value_loss(scores.values, batch) * batch.value_weights).sum(), policy)


class SelfImitation(A2c):
    """What went worse than the critic expected is dropped."""

    def normalised(self, advantages, rollout):
        return advantages.clamp(min=0)


TEXTBOOK = [Reinforce, Ppo, A2c, Grpo, Impala, Decoupled, Cispo, Gspo, Aged, Spo, WeightedRegression, SelfImitation]


@pytest.mark.parametrize("algorithm", TEXTBOOK)
def test_textbook_algorithms_pass(algorithm) -> None:
    check_algorithm(algorithm())


@found_by("where one ratio is of a whole chunk, return advantages and weights as [T, N]")
class RatioOfAChunkWithAdvantagesOfActions(Gspo):
    def advantages(self, rollout):
        return Grpo.advantages(self, rollout)

    def log_ratio(self, scores, batch):
        return super().log_ratio(scores, batch)[:, None]


# ------------------------------------------------------------------------------------------------------------ clips

POSITIVE = "a gradient in every log-prob of positive advantage at a ratio of"
NEGATIVE = "a gradient in every log-prob of negative advantage at a ratio of"


@found_by(f"{NEGATIVE} 1,")
class NegativeAdvantagesClippedAway(Grpo):
    def surrogate(self, log_ratio, advantages):
        return super().surrogate(log_ratio, advantages.clamp(min=0))


@found_by(f"{NEGATIVE} 2,")
class RatioClippedAlone(Grpo):
    def surrogate(self, log_ratio, advantages):
        return -log_ratio.exp().clamp(0.8, 1.2) * advantages


@found_by(NEGATIVE)
class BoundsOnTheLogRatio(Grpo):
    def surrogate(self, log_ratio, advantages):
        return -torch.min(log_ratio.exp() * advantages, log_ratio.clamp(0.8, 1.2).exp() * advantages)


@found_by(f"{POSITIVE} 0.5,")
class LogRatioClipped(Grpo):
    def surrogate(self, log_ratio, advantages):
        return -log_ratio.clamp(-0.2, 0.2).exp() * advantages


@found_by(f"{POSITIVE} 0.5,")
class MaximumForMinimum(Grpo):
    def surrogate(self, log_ratio, advantages):
        ratio = log_ratio.exp()
        return -torch.max(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@found_by(f"{POSITIVE} 0.5,")
class MaximumForMinimumOfChunks(Ppo):
    def surrogate(self, ratio, advantages):
        return -torch.maximum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@found_by(f"{POSITIVE} 1,")
class BoundsSwapped(Grpo):
    def surrogate(self, log_ratio, advantages):
        ratio = log_ratio.exp()
        return -torch.min(ratio * advantages, ratio.clamp(1.2, 0.8) * advantages)


@found_by(f"{POSITIVE} 0.5,")
class MaskedOutsideTheBounds(Grpo):
    def surrogate(self, log_ratio, advantages):
        ratio = log_ratio.exp()
        return -ratio * advantages * ((ratio > 0.8) & (ratio < 1.2))


@found_by(POSITIVE)
class HalfOfTheTokens(Grpo):
    def log_ratio(self, scores, batch):
        log_probs = scores.log_probs.clone()
        log_probs[..., ::2] = log_probs[..., ::2].detach()
        return log_probs - batch.log_probs


@found_by(POSITIVE)
class LaterActionsDetached(Grpo):
    def log_ratio(self, scores, batch):
        log_probs = torch.cat([scores.log_probs[:, :1], scores.log_probs[:, 1:].detach()], 1)
        return log_probs - batch.log_probs


@found_by(POSITIVE)
class FirstTokenAlone(Reinforce):
    def loss(self, scores, batch):
        return done(-(scores.log_probs[..., 0] * batch.advantages * batch.weights).sum())


@found_by("a step at a ratio of 0.5 that makes actions of positive advantage likelier")
class SquaredLogRatio(Grpo):
    def surrogate(self, log_ratio, advantages):
        return -(log_ratio + 0.5 * log_ratio.square() * 4) * advantages


@found_by("no push away from the old policy")
class SubtractedDivergence(Grpo):
    def surrogate(self, log_ratio, advantages):
        return super().surrogate(log_ratio, advantages) - 0.1 * (log_ratio.exp() - 1 - log_ratio)


@found_by("a pull towards the reference policy")
class DivergenceTurned(Grpo):
    def divergence(self, scores, batch):
        return batch.reference_log_probs - scores.log_probs


@found_by("batch.reference_log_probs is not used")
class DivergenceOfItself(Grpo):
    def divergence(self, scores, batch):
        d = batch.log_probs - scores.log_probs
        return d.exp() - d - 1


# ------------------------------------------------------------------------------------------------------- the critic


@found_by("a step towards batch.returns of values that went the other way")
class SmallerOfBothValueLosses(Ppo):
    def value_loss(self, values, batch):
        clipped = batch.values + (values - batch.values).clamp(-0.2, 0.2)
        return torch.minimum((values - batch.returns) ** 2, (clipped - batch.returns) ** 2)


@found_by("a step towards batch.returns of values that went the other way")
class ValuesClippedAlone(Ppo):
    def value_loss(self, values, batch):
        clipped = batch.values + (values - batch.values).clamp(-0.2, 0.2)
        return (clipped - batch.returns) ** 2


@found_by("a gradient in values")
class ValuesDetached(Ppo):
    def value_loss(self, values, batch):
        return super().value_loss(values.detach(), batch)


@found_by("a step of the values towards batch.returns")
class ValuesTowardsTheOldOnes(Ppo):
    def value_loss(self, values, batch):
        return (values - batch.values) ** 2


# ---------------------------------------------------------------------------------------------------- advantages

BOOTSTRAP = "a higher target before the end of the rollout where what follows is worth more"


@found_by("the same however many steps follow in which nothing is valid")
class NormalisedOverPadding(Ppo):
    def normalised(self, advantages, rollout):
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        return torch.where(rollout.samples, scaled, 0.0)


@found_by("the same however many steps follow in which nothing is valid")
class DividedByTheLength(Reinforce):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        return attrs.evolve(made, advantages=made.advantages / rollout.rewards.shape[0])


@found_by("no lower target where the critic expected more")
class AdvantagesAsReturns(Ppo):
    def targets(self, advantages, rollout):
        return advantages


@found_by("no higher advantage where the critic expected more")
class ReturnsAsAdvantages(Ppo):
    def normalised(self, advantages, rollout):
        return super().normalised(advantages + rollout.values, rollout)


@found_by("take advantages before they are normalised")
class Swapped(Ppo):
    def advantages(self, rollout):
        made = super().advantages(rollout)
        return attrs.evolve(made, advantages=made.returns, returns=made.advantages)


@found_by("take advantages before they are normalised")
class ReturnsOfNormalisedAdvantages(Ppo):
    def targets(self, advantages, rollout):
        return torch.where(rollout.samples, self.normalised(advantages, rollout) + 0.5 * rollout.values, 0.0)


@found_by(BOOTSTRAP)
class NothingFollows(Ppo):
    def next_value(self, rollout, t):
        following, ended = super().next_value(rollout, t)
        return following * (t < len(rollout.values) - 1), ended


@found_by("no value of what follows a termination")
class TerminationsBootstrapped(Ppo):
    def next_value(self, rollout, t):
        return super().next_value(rollout.evolve(terminated=torch.zeros_like(rollout.terminated)), t)


@found_by("as much credit for actions up to a reward as for those after it")
class Forwards(Ppo):
    def gae(self, rollout):
        rewards, values = rollout.rewards.sum(-1), rollout.values
        advantages, carried = torch.zeros_like(values), torch.zeros_like(values[0])
        for t in range(len(values)):
            following, _ = self.next_value(rollout, t)
            carried = rewards[t] + self.gamma * following - values[t] + self.gamma * self.lam * carried
            advantages[t] = carried
        return torch.where(rollout.samples, advantages, 0.0)


@found_by("no more credit for an early action than for one that is paid")
class DiscountedTheWrongWay(Ppo):
    gamma, lam = 1.0, 1.3


@found_by("nothing of the next episode before the end of one (truncated)")
class CarriedOverTruncations(Ppo):
    def next_value(self, rollout, t):
        following, _ = super().next_value(rollout, t)
        return following, rollout.terminated[t].any(-1)


@found_by("a higher target where more is paid")
class RewardsOfTheFirstAction(Ppo):
    def gae(self, rollout):
        return super().gae(rollout.evolve(rewards=rollout.rewards[..., :1]))


@found_by("advantages: advantages: expected the same for a trajectory wherever it stands")
class BaselineOfTheWrongAxis(Grpo):
    def centred(self, returns, same):
        by_group = returns.view(-1, 4) if len(returns) % 4 == 0 else returns[None]
        return (by_group - by_group.mean(0)).flatten()


@found_by("finite numbers")
class NoEpsilon(Grpo):
    def centred(self, returns, same):
        mean = same @ returns / same.sum(1)
        deviation = ((same * (returns[None] - mean[:, None]) ** 2).sum(1) / same.sum(1)).sqrt()
        return (returns - mean) / deviation


@found_by("more weight * advantage for a trajectory that succeeds")
class MeanMinusReturns(Grpo):
    def centred(self, returns, same):
        return -super().centred(returns, same)


# -------------------------------------------------------------------------------------------------------- old data


@found_by("off_policy: expected old data that count otherwise than new ones, got the same loss")
class SaysThatItCorrects(Reinforce):
    off_policy = True


@found_by("off_policy: expected old data that count otherwise than new ones, got the same loss")
class RatioToItself(Reinforce):
    off_policy = True

    def loss(self, scores, batch):
        ratio = (scores.log_probs - scores.log_probs.detach()).sum(-1).exp()
        return done(-(ratio * batch.advantages * batch.weights).sum())


@found_by("needs: expected a use of proximal_log_probs")
class ProximalLogProbsUnused(Grpo):
    needs = Requirements(groups=True, reference=True, proximal_log_probs=True)


@found_by("off_policy: expected True where proximal and recorded log_probs are compared, got False")
class OffPolicyInSecret(Decoupled):
    off_policy = False


IMPORTANCE = "no smaller gradient at a ratio of 2 to the policy that acted than at 0.5"


@found_by(IMPORTANCE)
class WeightInverted(Impala):
    def loss(self, scores, batch):
        log_probs = scores.log_probs.sum(-1)
        weight = (batch.log_probs.sum(-1) - log_probs.detach()).exp().clamp(max=2.0)
        return done(-(weight * log_probs * batch.advantages * batch.weights).sum())


@found_by(IMPORTANCE)
class BehaviourInverted(Decoupled):
    def loss(self, scores, batch):
        advantages, weights = batch.advantages[..., None], batch.weights[..., None]
        behaviour = (batch.log_probs - batch.proximal_log_probs).exp()
        return done((behaviour * self.surrogate(self.log_ratio(scores, batch), advantages) * weights).sum())


# ----------------------------------------------------------------------------------------------- masks and entropies


@found_by("the same loss whatever the scores of actions that are not valid")
class RatioOfAllActions(Ppo):
    def ratio(self, scores, batch):
        return (scores.log_probs - batch.log_probs).sum((1, 2)).exp()


@found_by("the same loss whatever the scores of actions that are not valid")
class EntropyOfAllActions(Ppo):
    def loss(self, scores, batch):
        loss = super().loss(scores, batch)
        return attrs.evolve(loss, total=loss.total - 0.01 * (scores.entropy.sum((1, 2)) * batch.weights).sum())


@found_by("a loss that does not rise with the entropy")
class EntropyAdded(Ppo):
    entropy_coef = -0.01


@found_by("no gradient in log_probs from advantages of 0")
class AdvantagesAboveZero(Ppo):
    def surrogate(self, ratio, advantages):
        return super().surrogate(ratio, advantages + 1)


@found_by("the same gradient from micro-batches")
class MeanOfTheBatch(Reinforce):
    def loss(self, scores, batch):
        return done(-(scores.log_probs.sum(-1) * batch.advantages).mean())


@found_by("advantages: value_weights: expected 0 where not valid")
class PaddedValues(Ppo):
    def advantages(self, rollout):
        return attrs.evolve(super().advantages(rollout), value_weights=torch.ones_like(rollout.values))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant) -> None:
    with pytest.raises(CheckFailed) as failed:
        check_algorithm(mutant())
    assert MUTANTS[mutant] in str(failed.value)
