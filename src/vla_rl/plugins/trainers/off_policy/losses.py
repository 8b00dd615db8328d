"""Formulas of SAC and RLPD for B transitions; each returns a term for each transition, [B].

SAC: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv:1812.05905), equations in brackets.
RLPD: Ball et al. 2023 (arXiv:2302.02948), algorithm 1.
"""

from __future__ import annotations

from torch import Tensor


def soft_targets(
    rewards: Tensor, bootstrap: Tensor, next_values: Tensor, next_log_probs: Tensor | None, temperature: Tensor
) -> Tensor:
    """Return r + discount V(s'), with V(s') = min Q'(s', a') - temperature * log pi(a' | s') (eq. 3 and 5).

    Args:
        rewards: [B].   bootstrap: the discount, or 0 after an end, [B].
        next_values: Q-values of the target networks, [Z, B].
        next_log_probs: [B]; None leaves the entropy out (an option of RLPD).
    """
    values = next_values.min(0).values
    if next_log_probs is not None:
        values = values - temperature * next_log_probs
    return rewards + bootstrap * values


def critic_losses(q_values: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over the Q-networks of (Q(s, a) - target)^2 / 2 (eq. 5); Q-values are [N, B]."""
    return (q_values - targets).square().sum(0) / 2


def actor_losses(temperature: Tensor, log_probs: Tensor, values: Tensor) -> Tensor:
    """Return temperature * log pi(a | s) - Q(s, a) for actions a that the policy samples (eq. 9)."""
    return temperature * log_probs - values


def cloning_losses(actions: Tensor, executed: Tensor) -> Tensor:
    """Return the mean squared distances between the policy's actions and those of the transitions, [B, N] each, scaled
    to [-1, 1]: the cloning term of TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860, eq. 3)."""
    return (actions - executed).square().mean(1)


def temperature_losses(temperature: Tensor, log_probs: Tensor, target_entropy: float) -> Tensor:
    """Return -temperature * (log pi(a | s) + target entropy) (eq. 18); log-probs are without gradient."""
    return -temperature * (log_probs.detach() + target_entropy)


def ensemble_value(q_values: Tensor, *, mean: bool) -> Tensor:
    """Return the value that the policy maximises: the mean of Q-values [N, B] (RLPD), or the lowest one (SAC)."""
    return q_values.mean(0) if mean else q_values.min(0).values
