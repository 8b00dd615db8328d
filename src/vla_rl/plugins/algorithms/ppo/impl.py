"""PPO (Schulman et al. 2017) with GAE over chunks or over single actions (RLinf-VLA 2025, section 4.2)."""

from __future__ import annotations

import torch

from vla_rl.core import functional as F
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.objectives import aggregation_weights, by_action, by_chunk, clipped_policy_loss, critic_loss
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.ppo import PPOConfig


class PPO(Algorithm):
    needs = frozenset({"values"})

    def __init__(self, config: PPOConfig):
        self.config = config
        self.value_granularity = config.advantage

    def advantages(self, rollout: Rollout) -> Advantages:
        """GAE at the configured granularity; the value of the final observation stands in where a limit cut."""
        config, chunk = self.config, rollout.valid.shape[-1]
        assert rollout.values is not None and rollout.next_values is not None  # the runtime provides what `needs` names
        terminated, truncated = rollout.terminated, rollout.truncated
        if config.time_limit == "terminal":
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        if config.advantage == "chunk":
            mask = rollout.samples
            advantages, returns = F.gae(
                rollout.rewards.sum(-1),
                rollout.values,
                rollout.next_values,
                terminated.any(-1),
                truncated.any(-1),
                gamma=config.gamma,
                lam=config.lam,
            )
        else:
            mask = rollout.valid
            advantages, returns = (
                by_chunk(flat, chunk)
                for flat in F.gae(
                    by_action(rollout.rewards),
                    by_action(rollout.values),
                    rollout.next_values.repeat_interleave(chunk, dim=0),
                    by_action(terminated),
                    by_action(truncated),
                    gamma=config.gamma,
                    lam=config.lam,
                )
            )
        zero = torch.zeros(())
        metrics = {
            "value/explained_variance": F.explained_variance(rollout.values, returns, mask),
            "advantage/std": float(advantages[mask].std()) if int(mask.sum()) > 1 else 0.0,
        }
        if config.normalize_advantages:
            advantages = F.normalize(advantages, mask)
        weights, counts = aggregation_weights(rollout, config.log_prob, config.aggregation)
        return Advantages(
            advantages=torch.where(mask, advantages, zero),
            weights=weights,
            counts=counts,
            returns=torch.where(mask, returns, zero),
            value_weights=mask.float(),
            metrics=metrics,
        )

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        config = self.config
        policy = clipped_policy_loss(
            scores,
            batch,
            granularity=config.log_prob,
            low=config.clip_low,
            high=config.clip_high,
            dual_clip=config.dual_clip,
            entropy_coef=config.entropy_coef,
        )
        critic = critic_loss(scores, batch, clip=config.value_clip, huber_delta=config.huber_delta)
        return Loss(
            total=policy.total + config.value_coef * critic,
            metrics={**policy.metrics, "loss/value": critic.detach()},
            maxima=policy.maxima,
        )
