"""What several algorithms share between `functional.py` and their plugins: the policy losses with their diagnostics,
the critic's part, and the flattening of [T, N, C] to one time axis."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores, Statistic
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.checks import ShapeError, check_shapes
from vla_rl.toolkit.algorithms.settings import Aggregation, ClipSettings, CriticSettings, Granularity, PolicySettings
from vla_rl.toolkit.algorithms.statistics import EffectiveSize, Mean, RatioQuantiles


def by_action(tensor: Tensor) -> Tensor:
    """[T, N, C] -> [T * C, N]: one time axis of actions."""
    steps, columns, chunk = tensor.shape
    return tensor.permute(0, 2, 1).reshape(steps * chunk, columns)


def by_chunk(flat: Tensor, chunk: int) -> Tensor:
    """[T * C, N] -> [T, N, C], inverse of `by_action`."""
    return flat.reshape(-1, chunk, flat.shape[1]).permute(0, 2, 1)


def aggregation_weights(rollout: Rollout, granularity: Granularity, aggregation: Aggregation) -> tuple[Tensor, Tensor]:
    """Weights and counts of `functional.loss_weights` at the ratio's granularity: "chunk" [T, N], else [T, N, C]."""
    ended, chunk = rollout.terminated | rollout.truncated, rollout.valid.shape[-1]
    if granularity == "chunk":
        actions = by_chunk(F.episode_lengths(by_action(rollout.valid), by_action(ended)), chunk)
        relative = actions[..., 0] / (len(actions) * chunk)  # of the episode that the chunk begins in
        return F.loss_weights(rollout.samples, ended.any(-1), aggregation, relative)
    weights, counts = F.loss_weights(by_action(rollout.valid), by_action(ended), aggregation)
    return by_chunk(weights, chunk), by_chunk(counts, chunk)


# ---------------------------------------------------------------------------------------------------- policy losses


@frozen(kw_only=True, eq=False)
class Entries:
    """A micro-batch at the granularity of the ratio: "chunk" [B], "action" [B, C] or "token" [B, C, M]."""

    log_probs: Tensor
    """Of the current policy, with gradient."""
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    """Of the whole optimiser step; 0 where not valid."""

    @property
    def mask(self) -> Tensor:
        return self.weights > 0


def entries_of(scores: Scores, batch: Batch, granularity: Granularity) -> Entries:
    """Log-probs summed to the granularity; advantages repeated, and weights shared out, over what is finer."""
    new = F.reduce_tokens(scores.log_probs, batch.valid, granularity)
    return Entries(
        log_probs=new,
        old_log_probs=F.reduce_tokens(batch.log_probs, batch.valid, granularity),
        advantages=F.expand_to(batch.advantages, new),
        weights=F.expand_to(batch.weights, new, mean=True),
    )


def clipped_policy_loss(scores: Scores, batch: Batch, settings: ClipSettings) -> Loss:
    """PPO's clipped surrogate, with entropy bonus, KL term and diagnostics (`policy_loss`)."""
    e = entries_of(scores, batch, settings.log_prob)
    low, high, dual_clip = settings.clip_low, settings.clip_high, settings.dual_clip
    surrogate = F.clipped_surrogate(e.log_probs, e.old_log_probs, e.advantages, low=low, high=high, dual_clip=dual_clip)
    with torch.no_grad():
        clipped = F.clipped(e.log_probs, e.old_log_probs, e.advantages, low=low, high=high, dual_clip=dual_clip)
    return policy_loss(surrogate, e, scores, batch, settings, clipped=clipped, dead=clipped)


def policy_loss(
    surrogate: Tensor,
    entries: Entries,
    scores: Scores,
    batch: Batch,
    settings: PolicySettings,
    *,
    clipped: Tensor,
    dead: Tensor,
    trust: Tensor | None = None,
) -> Loss:
    """sum(weights * (surrogate - entropy_coef * H + kl_coef * KL(pi || reference))), with the diagnostics that every
    policy loss reports. Each entry counts once in a diagnostic, whatever it weighs in the loss.

    Args, at the entries' shape:
        surrogate: loss of an entry, with gradient.
        clipped: bool, entries that PPO's clip would keep constant.   dead: bool, entries without gradient.
        trust: factor on the ratio in the gradient; None: 1.
    """
    mask = entries.mask
    check_shapes(surrogate=surrogate, log_probs=entries.log_probs, clipped=clipped, dead=dead, trust=trust)
    entropy = F.reduce_tokens(scores.entropy, batch.valid, settings.log_prob)
    policy, total = F.weighted_sum(surrogate, entries.weights), surrogate
    if settings.entropy_coef:
        total = total - settings.entropy_coef * entropy
    statistics: dict[str, Statistic] = {"policy/entropy": Mean.of(entropy.detach(), mask)}
    if settings.kl_coef:
        if batch.reference_log_probs is None:
            raise ShapeError("kl_coef needs the batch's reference_log_probs; the algorithm has to need 'reference'")
        reference = F.reduce_tokens(batch.reference_log_probs, batch.valid, settings.log_prob)
        divergence = F.kl_estimate(entries.log_probs, reference, settings.kl_estimator)
        total = total + settings.kl_coef * divergence
        statistics["policy/kl_reference"] = Mean.of(divergence.detach(), mask)
    with torch.no_grad():
        log_ratio = F.log_ratio(entries.log_probs, entries.old_log_probs)
        ratio = log_ratio.exp()
        cut = log_ratio.abs() >= F.LOG_RATIO_LIMIT
        acted, lag = batch.valid.any(-1), batch.lag.float()
        statistics |= {
            "policy/approx_kl": Mean.of(F.kl_estimate(entries.old_log_probs, entries.log_probs, "k3"), mask),
            "loss/clip_fraction": Mean.of(clipped.float(), mask),
            "policy/dead_gradients": Mean.of((dead | cut).float(), mask),
            "policy/ratio_cut": Mean.of(cut.float(), mask),
            "policy/ratio": RatioQuantiles.of(log_ratio, mask),
            "policy/effective_sample_size": EffectiveSize.of(ratio if trust is None else trust * ratio, mask),
            "policy/lag_mean": Mean.of(lag, acted),
        }
        maxima = {
            "policy/ratio_max": torch.where(mask, ratio, torch.zeros_like(ratio)).max(),
            "policy/lag_max": torch.where(acted, lag, torch.zeros_like(lag)).max(),
        }
    return Loss(
        total=F.weighted_sum(total, entries.weights),
        metrics={"loss/policy": policy.detach()},
        maxima=maxima,
        statistics=statistics,
    )


# ------------------------------------------------------------------------------------------------------- the critic


def critic_verdict(rollout: Rollout, settings: CriticSettings) -> Advantages:
    """GAE and the critic's targets at the granularity `settings.advantage`; the value of the final observation stands
    in where a limit cut (`time_limit: bootstrap`)."""
    chunk = rollout.valid.shape[-1]
    assert rollout.values is not None and rollout.next_values is not None  # the runtime provides what `needs` names
    terminated, truncated = rollout.terminated, rollout.truncated
    if settings.time_limit == "terminal":
        terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
    if settings.advantage == "chunk":
        mask = rollout.samples
        advantages, returns = F.gae(
            torch.where(rollout.valid, rollout.rewards, torch.zeros(())).sum(-1),
            rollout.values,
            rollout.next_values,
            terminated.any(-1),
            truncated.any(-1),
            gamma=settings.gamma,
            lam=settings.lam,
            valid=mask,
        )
    else:
        mask = rollout.valid
        flat = F.gae(
            by_action(rollout.rewards),
            by_action(rollout.values),
            rollout.next_values.repeat_interleave(chunk, dim=0),
            by_action(terminated),
            by_action(truncated),
            gamma=settings.gamma,
            lam=settings.lam,
            valid=by_action(mask),
        )
        advantages, returns = by_chunk(flat[0], chunk), by_chunk(flat[1], chunk)
    metrics = {
        "value/explained_variance": F.explained_variance(rollout.values, returns, mask),
        "advantage/std": float(advantages[mask].std()) if int(mask.sum()) > 1 else 0.0,
    }
    if settings.normalize_advantages:
        advantages = F.normalize(advantages, mask, std=settings.advantage_std)
    weights, counts = aggregation_weights(rollout, settings.log_prob, settings.aggregation)
    value_weights, value_counts = aggregation_weights(rollout, settings.advantage, settings.aggregation)
    return Advantages(
        advantages=advantages,
        weights=weights,
        counts=counts,
        returns=returns,
        value_weights=value_weights,
        value_counts=value_counts,
        metrics=metrics,
    )


def with_critic(policy: Loss, scores: Scores, batch: Batch, settings: CriticSettings) -> Loss:
    """The policy's loss plus value_coef times the weighted sum of `functional.value_loss`."""
    if scores.values is None or batch.values is None or batch.returns is None or batch.value_weights is None:
        raise ShapeError("the critic's loss needs values, returns and value weights; the model or the rollout has none")
    values, returns, old = scores.values, batch.returns, batch.values
    clip, delta = settings.value_clip, settings.huber_delta
    loss = F.weighted_sum(F.value_loss(values, returns, old, clip=clip, huber_delta=delta), batch.value_weights)
    with torch.no_grad():
        clipped = F.value_clipped(values, returns, old, clip=clip, huber_delta=delta).float()
    return evolve(
        policy,
        total=policy.total + settings.value_coef * loss,
        metrics={**policy.metrics, "loss/value": loss.detach()},
        statistics={**policy.statistics, "value/clip_fraction": Mean.of(clipped, batch.value_weights > 0)},
    )
