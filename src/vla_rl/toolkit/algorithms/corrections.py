"""Data that older versions of the policy acted for. Three policies take part: the one that acted, mu, whose log-probs
are recorded; the one at the start of the training step, pi_old (the proximal policy); and the one in training, pi.
PPO's ratio pi / pi_old says how far an update went, the weight pi_old / mu how old the data are. Formulas and sources:
docs/algorithms.md."""

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
from vla_rl.toolkit.algorithms.settings import Aggregation, CorrectionSettings, Granularity
from vla_rl.toolkit.algorithms.statistics import Mean, RatioQuantiles

# ------------------------------------------------------------------------------------------------------- in the loss


@frozen(kw_only=True, eq=False)
class Proximal:
    """pi_old for the entries of a micro-batch, without gradient."""

    log_probs: Tensor
    """What the surrogate's ratio is taken with."""
    weights: Tensor
    """Factor on each entry's surrogate, >= 0: of pi_old / mu what the settings leave of it."""
    behaviour: Tensor | None = None
    """log(pi_old / mu), within +-20; None without a correction."""
    limit: float | None = None
    """Weights above are dropped or truncated."""

    @property
    def dropped(self) -> Tensor:
        """bool: entries without gradient, as their weight was above the threshold."""
        return self.weights == 0

    @property
    def trust(self) -> Tensor | None:
        """What is left of pi / mu in the gradient, as a factor; None: all of it."""
        return None if self.behaviour is None else self.weights / self.behaviour.exp()

    @torch.no_grad()
    def statistics(self, mask: Tensor) -> dict[str, Statistic]:
        """How far pi_old is from mu, and the share of entries that are dropped or weigh less for it."""
        found: dict[str, Statistic] = {}
        if self.behaviour is not None:
            found["policy/behaviour_weight"] = RatioQuantiles.of(self.behaviour, mask)
        if self.behaviour is not None and self.limit is not None:
            found["policy/behaviour_cut"] = Mean.of((self.behaviour.exp() > self.limit).float(), mask)
        return found


def proximal_policy(entries: LossTerms, batch: Batch, settings: CorrectionSettings) -> Proximal:
    """pi_old and the entries' weights, as the settings' `correction` has them: none (pi_old is mu), decoupled
    (pi_old / mu, or 0 above the threshold), truncated (min(pi_old / mu, truncation)) or v-trace (1: its advantages
    are weighted already). Where pi_old is mu, all of them are plain PPO, bit for bit."""
    mu = entries.old_log_probs
    if settings.correction == "none":
        return Proximal(log_probs=mu, weights=torch.ones_like(mu))
    if settings.proximal == "interpolate":
        old = interpolated(entries.log_probs, mu, batch.lag)
    else:
        old = F.reduce_tokens(_given(batch.fresh_log_probs), batch.valid, settings.log_prob)
    behaviour = F.log_ratio(old, mu)
    weights = behaviour.exp()
    if settings.correction == "v-trace":
        return Proximal(log_probs=old, weights=torch.ones_like(mu), behaviour=behaviour)
    if settings.correction == "truncated":
        limit = settings.truncation
        return Proximal(log_probs=old, weights=weights.clamp(max=limit), behaviour=behaviour, limit=limit)
    threshold = settings.behaviour_weight_threshold
    if threshold is not None:
        weights = torch.where(weights <= threshold, weights, torch.zeros_like(weights))
    return Proximal(log_probs=old, weights=weights, behaviour=behaviour, limit=threshold)


def interpolated(log_probs: Tensor, behaviour_log_probs: Tensor, lag: Tensor) -> Tensor:
    """log pi_old without a forward pass, without gradient: log mu + a (log pi - log mu), with
    a = (v_old - v_mu) / (v_now - v_mu) of the three versions (A-3PO).

    The policy in training is on its way to the next version: v_now = v_old + 1, so a = lag / (lag + 1), as in RLinf
    and AReaL. 0 at lag 0, where pi_old is mu; 1/2 at lag 1. Before the first optimiser step pi is pi_old, and this is
    nearer to mu than it: what the approximation costs.

    Args:
        log_probs, behaviour_log_probs: one shape, [B], [B, C] or [B, C, M].   lag: int64 [B], v_old - v_mu.
    """
    age = lag.clamp(min=0).to(log_probs.dtype)
    share = F.expand_to(age / (age + 1), log_probs)
    return (behaviour_log_probs + share * (log_probs - behaviour_log_probs)).detach()


def renormalise_masked(
    advantages: Advantages, rollout: Rollout, settings: CorrectionSettings, aggregation: Aggregation
) -> Advantages:
    """The advantages, where entries that the behaviour threshold drops leave the loss's divisor too: a mean over those
    that are left, as in RLinf. Its aggregation "rlinf" divides by the number of all; and with interpolation, what is
    dropped is known in the loss alone, and stays in the divisor."""
    threshold = settings.behaviour_weight_threshold
    if threshold is None or settings.proximal == "interpolate" or aggregation == "rlinf":
        return advantages
    kept = (_behaviour(rollout, settings.log_prob).exp() <= threshold).float()
    share = kept.mean(-1) if settings.log_prob == "token" else kept
    return attrs.evolve(advantages, counts=advantages.divisors[0] * share)


# -------------------------------------------------------------------------------------------------- in the advantages


def step_log_weights(rollout: Rollout, granularity: Literal["chunk", "action"]) -> Tensor:
    """log(pi_old / mu) of whole chunks or of actions, all their tokens together, within +-20: float32 [S, N] as in
    `losses.Steps`; 0 where not valid."""
    weights = _behaviour(rollout, granularity)
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
    """V-trace (Espeholt et al. 2018, eq. 1 and section 4.2, lambda as in remark 2), ends as in `functional.gae`:

        rho_t = min(rho_bar, pi_old / mu)      c_t = lam * min(c_bar, pi_old / mu)
        v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
        A_t = rho_t (r_t + gamma v_{t+1} - V_t)

    Behind a termination there is no value; behind a truncation, and behind the last entry, v_{t+1} is V_{t+1}.
    With weights of 1 the v_t are GAE's returns, and for lam = 1 A_t its advantages: n-step returns less V_t.

    Args:
        rewards ... truncated, valid: as in `functional.gae`.
        log_weights: float [S, N], log(pi_old / mu) of each entry.
    Returns: (advantages A, value targets v), float [S, N]; 0 where not valid.
    Raises NotFiniteError as `functional.gae` does.
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


def _behaviour(rollout: Rollout, granularity: Granularity) -> Tensor:
    """log(pi_old / mu), within +-20: [T, N], [T, N, C] or [T, N, C, M]; 0 where not valid."""
    old, valid = _given(rollout.fresh_log_probs).flatten(0, 1), rollout.valid.flatten(0, 1)
    mu = F.reduce_tokens(rollout.log_probs.flatten(0, 1), valid, granularity)
    weights = F.log_ratio(F.reduce_tokens(old, valid, granularity), mu)
    return weights.reshape(*rollout.samples.shape, *weights.shape[1:])


def _given(fresh: Tensor | None) -> Tensor:
    if fresh is None:
        raise ShapeError("the correction needs fresh_log_probs; the algorithm has to need 'fresh-log-probs'")
    return fresh
