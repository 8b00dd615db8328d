"""Off-policy corrections for data collected by older versions of the policy.

Three policies take part: the behaviour policy mu, whose log-probs are recorded; the proximal policy pi_old, at the
start of the training step; and the policy in training, pi. PPO's ratio pi / pi_old says how far an update went; the
weight pi_old / mu says how old the data are. Formulas and sources: docs/reference/algorithms.md.
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from attrs import frozen
from torch import Tensor

from vla_rl.core.types import Advantages, Batch, Rollout, Statistic
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.checks import ShapeError
from vla_rl.toolkit.algorithms.losses import LossTerms, by_action
from vla_rl.toolkit.algorithms.settings import (
    Aggregation,
    CorrectionSettings,
    Decoupled,
    Granularity,
    Truncated,
    VTrace,
)
from vla_rl.toolkit.algorithms.statistics import Mean, RatioQuantiles

# ------------------------------------------------------------------------------------------------------- in the loss


@frozen(kw_only=True, eq=False)
class Proximal:
    """The proximal policy pi_old for the loss terms of a micro-batch, without gradient."""

    log_probs: Tensor
    """Log-probs of pi_old, the denominator of the surrogate's ratio."""
    weights: Tensor
    """Factor on each term's surrogate, >= 0: pi_old / mu, as far as the settings keep it."""
    behaviour: Tensor | None = None
    """log(pi_old / mu), clamped to +-20; None without a correction."""
    limit: float | None = None
    """Threshold above which weights are dropped or truncated; None: none."""

    @property
    def dropped_terms(self) -> Tensor:
        """Loss terms without gradient, since their weight was above the threshold; bool."""
        return self.weights == 0

    @property
    def trust_factor(self) -> Tensor | None:
        """Factor that the correction leaves of pi / mu in the gradient; None: all of it."""
        return None if self.behaviour is None else self.weights / self.behaviour.exp()

    @torch.no_grad()
    def compute_statistics(self, mask: Tensor) -> dict[str, Statistic]:
        """Return statistics of how far pi_old is from mu, and of the share of loss terms that are dropped or
        truncated."""
        statistics: dict[str, Statistic] = {}
        if self.behaviour is not None:
            statistics["policy/behaviour_weight"] = RatioQuantiles.of(self.behaviour, mask)
        if self.behaviour is not None and self.limit is not None:
            statistics["policy/behaviour_cut"] = Mean.of((self.behaviour.exp() > self.limit).float(), mask)
        return statistics


def proximal_policy(entries: LossTerms, batch: Batch, settings: CorrectionSettings) -> Proximal:
    """Return pi_old and the loss terms' weights for the settings' `correction`: none (pi_old is mu), decoupled
    (pi_old / mu, or 0 above the threshold), truncated (min(pi_old / mu, threshold)) or v-trace (1, since its
    advantages are already weighted). If pi_old is mu, all of them equal plain PPO bit for bit."""
    mu, correction = entries.old_log_probs, settings.correction
    if correction is None:
        return Proximal(log_probs=mu, weights=torch.ones_like(mu))
    if not isinstance(correction, VTrace) and correction.proximal == "interpolate":
        old = interpolate_log_probs(entries.log_probs, mu, batch.lag)
    else:
        old = F.reduce_tokens(_require_log_probs(batch.proximal_log_probs), batch.valid, settings.log_prob)
    behaviour = F.log_ratio(old, mu)
    weights = behaviour.exp()
    if isinstance(correction, VTrace):
        return Proximal(log_probs=old, weights=torch.ones_like(mu), behaviour=behaviour)
    threshold = correction.threshold
    if isinstance(correction, Truncated):
        weights = weights.clamp(max=threshold)
    elif threshold is not None:
        weights = torch.where(weights <= threshold, weights, torch.zeros_like(weights))
    return Proximal(log_probs=old, weights=weights, behaviour=behaviour, limit=threshold)


def interpolate_log_probs(log_probs: Tensor, behaviour_log_probs: Tensor, lag: Tensor) -> Tensor:
    """Approximate log pi_old without a forward pass and without gradient: log mu + a (log pi - log mu), with
    a = (v_old - v_mu) / (v_now - v_mu) of the three versions (A-3PO).

    The policy in training becomes the next version: v_now = v_old + 1, so a = lag / (lag + 1), as in RLinf and AReaL.
    It is 0 at lag 0, where pi_old is mu, and 1/2 at lag 1. Before the first optimiser step pi is pi_old, and the result
    is nearer to mu than that: the cost of the approximation.

    Args:
        log_probs, behaviour_log_probs: one shape, [B], [B, C] or [B, C, M].
        lag: int64 [B], v_old - v_mu.
    """
    age = lag.clamp(min=0).to(log_probs.dtype)
    share = F.expand_to(age / (age + 1), log_probs)
    return (behaviour_log_probs + share * (log_probs - behaviour_log_probs)).detach()


def renormalise_masked(
    advantages: Advantages, rollout: Rollout, settings: CorrectionSettings, aggregation: Aggregation
) -> Advantages:
    """Return the advantages with loss terms above the behaviour threshold excluded from the loss's divisor: a mean over
    the remaining terms, as in RLinf. Two cases keep the divisor: aggregation "rlinf" divides by the number of all
    terms, and with interpolation the dropped terms are known only in the loss."""
    correction = settings.correction
    if not isinstance(correction, Decoupled) or correction.threshold is None:
        return advantages
    if correction.proximal == "interpolate" or aggregation == "rlinf":
        return advantages
    within_threshold = (_compute_log_weights(rollout, settings.log_prob).exp() <= correction.threshold).float()
    share = within_threshold.mean(-1) if settings.log_prob == "token" else within_threshold
    return attrs.evolve(advantages, counts=advantages.divisors[0] * share)


# -------------------------------------------------------------------------------------------------- in the advantages


def step_log_weights(rollout: Rollout, granularity: Literal["chunk", "action"]) -> Tensor:
    """Return log(pi_old / mu) of whole chunks or of actions, summed over their tokens and clamped to +-20:
    float32 [S, N] as in `losses.Steps`; 0 where not valid."""
    weights = _compute_log_weights(rollout, granularity)
    return weights if granularity == "chunk" else by_action(weights)


def v_trace(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_weights: Tensor,
    *,
    gamma: float,
    lam: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute V-trace advantages and value targets (Espeholt et al. 2018, eq. 1 and section 4.2, lambda as in
    remark 2), with ends as in `functional.gae`:

        rho_t = min(rho_bar, pi_old / mu)      c_t = lam * min(c_bar, pi_old / mu)
        v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
        A_t = rho_t (r_t + gamma v_{t+1} - V_t)

    After a termination the value is 0; after a truncation, and after the last entry, v_{t+1} is V_{t+1}. With weights
    of 1 the v_t are GAE's returns, and for lam = 1 the A_t are its advantages: n-step returns minus V_t.

    Args:
        rewards ... truncated, valid: as in `functional.gae`.
        log_weights: float [S, N], log(pi_old / mu) of each entry.

    Returns: (advantages A, value targets v), float [S, N]; 0 where not valid. Raises NotFiniteError as `functional.gae`
    does.
    """
    valid, (rewards, values, log_weights) = F.checked_steps(
        next_values, terminated, truncated, valid, rewards=rewards, values=values, log_weights=log_weights
    )
    zero = torch.zeros_like(rewards)
    if not len(rewards):
        return zero, zero.clone()
    weights = log_weights.exp()
    rho, c = weights.clamp(max=rho_bar), lam * weights.clamp(max=c_bar)
    ended = terminated | truncated
    advantages, targets = torch.zeros_like(rewards), torch.zeros_like(rewards)
    following, excess = next_values[-1], zero[0]  # V_{t+1}, and v_{t+1} - V_{t+1}
    for t in reversed(range(rewards.shape[0])):
        after = torch.where(ended[t], next_values[t], following) * (~terminated[t]).float()
        beyond = (~ended[t]).float() * excess
        delta = rewards[t] + gamma * after - values[t]
        now = rho[t] * delta + gamma * c[t] * beyond
        advantages[t] = torch.where(valid[t], rho[t] * (delta + gamma * beyond), zero[t])
        targets[t] = torch.where(valid[t], values[t] + now, zero[t])
        excess, following = torch.where(valid[t], now, excess), torch.where(valid[t], values[t], following)
    return advantages, targets


# ------------------------------------------------------------------------------------------------------------ inside


def _compute_log_weights(rollout: Rollout, granularity: Granularity) -> Tensor:
    """Return log(pi_old / mu), clamped to +-20: [T, N], [T, N, C] or [T, N, C, M]; 0 where not valid."""
    old, valid = _require_log_probs(rollout.proximal_log_probs).flatten(0, 1), rollout.valid.flatten(0, 1)
    mu = F.reduce_tokens(rollout.log_probs.flatten(0, 1), valid, granularity)
    weights = F.log_ratio(F.reduce_tokens(old, valid, granularity), mu)
    return weights.reshape(*rollout.samples.shape, *weights.shape[1:])


def _require_log_probs(proximal: Tensor | None) -> Tensor:
    if proximal is None:
        raise ShapeError("the correction needs proximal_log_probs; set that field of the algorithm's Requirements")
    return proximal
