"""The mathematics of the algorithms as pure functions on tensors; definitions as in docs/reference/algorithms.md.

Shapes: T chunk steps, N trajectories or envs, C actions in a chunk, M tokens in an action. They are checked and never
broadcast, since `[B]` against `[B, 1]` would be an outer product. Losses return a value a term; `weighted_sum` reduces.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from vla_rl.toolkit.algorithms.checks import (
    Aggregation,
    Deviation,
    Granularity,
    ShapeError,
    check_finite,
    check_masks,
    check_name,
    check_shapes,
    check_time_major,
)

LOG_RATIO_LIMIT = 20.0
"""Largest |log r|: e^20 is 5e8, so that a ratio times an advantage and its square stay finite in float32."""
EQUAL = 1e-6
"""Relative difference up to which numbers count as equal."""


# ---------------------------------------------------------------------------------------- masks and reductions


def valid_until_end(ended: Tensor) -> Tensor:
    """Return the mask of the steps up to and including the first end of each column.

    Args:
        ended: bool [S, N], time-major.

    Returns: bool [S, N].
    """
    check_time_major(ended=ended)
    check_masks(ended=ended)
    before = ended.long().cumsum(0) - ended.long()
    return before == 0


def weighted_sum(entries: Tensor, weights: Tensor) -> Tensor:
    """Return sum(weights * entries). Entries with weight 0 may hold anything, NaN included. For a gradient without NaN,
    the inputs of such an entry must be finite too."""
    check_shapes(entries=entries, weights=weights)
    return torch.where(weights != 0, entries * weights, torch.zeros_like(entries)).sum()


def reduce_tokens(per_token: Tensor, valid: Tensor, granularity: Granularity) -> Tensor:
    """Sum log-probs (or entropies) of tokens to the granularity of the ratio; invalid actions add nothing.

    Args:
        per_token: [B, C, M].
        valid: bool [B, C].

    Returns: [B] for "chunk", [B, C] for "action", [B, C, M] for "token".
    """
    if per_token.dim() != 3 or per_token.shape[:-1] != valid.shape:
        raise ShapeError(
            f"expected per_token [B, C, M] and valid [B, C], got {list(per_token.shape)} and {list(valid.shape)}"
        )
    check_masks(valid=valid)
    check_name("granularity", granularity, get_args(Granularity))
    masked = torch.where(valid.unsqueeze(-1), per_token, torch.zeros_like(per_token))
    if granularity == "token":
        return masked
    return masked.sum(-1) if granularity == "action" else masked.sum((-1, -2))


def expand_to(coarse: Tensor, fine: Tensor, mean: bool = False) -> Tensor:
    """Repeat [B] or [B, C] over the trailing dimensions of `fine`. `mean` divides by the number of repeats, so that
    weights keep their sum. Leading dimensions must agree."""
    if coarse.shape != fine.shape[: coarse.dim()]:
        raise ShapeError(f"{list(coarse.shape)} cannot be expanded to {list(fine.shape)}: leading dimensions differ")
    repeats = math.prod(fine.shape[coarse.dim() :])
    expanded = coarse.reshape(*coarse.shape, *[1] * (fine.dim() - coarse.dim())).expand(fine.shape)
    return expanded / repeats if mean else expanded


def episode_lengths(valid: Tensor, ended: Tensor) -> Tensor:
    """Count, for each entry, the valid entries of its episode within the column.

    Args:
        valid, ended: bool [S, N], time-major; an episode's last entry is the one where `ended`.

    Returns: float32 [S, N], at least 1.
    """
    check_time_major(valid=valid, ended=ended)
    check_masks(valid=valid, ended=ended)
    index = ended.long().cumsum(0) - ended.long()
    counts = torch.zeros(valid.shape[0] + 1, valid.shape[1], dtype=torch.float32, device=valid.device)
    counts.scatter_add_(0, index, valid.float())
    return counts.gather(0, index).clamp(min=1.0)


def loss_weights(
    valid: Tensor, ended: Tensor, aggregation: Aggregation, relative_lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights and divisor counts of a named loss aggregation.

    Args:
        valid, ended: bool [S, N], time-major (S chunk steps or actions).
        aggregation: "step-mean": every valid entry weighs the same. "trajectory-mean": 1/T_i per entry, so that every
            episode weighs the same (RLinf-VLA, eq. 12). "rlinf": T_max/T_i over the count of *all* entries.
        relative_lengths: float32 [S, N], T_i/T_max for "rlinf", if not of entries: RLinf counts actions, in chunks too.

    Returns: (weights, counts), float32 [S, N]; the loss is sum(weights * l) / sum(counts).
    """
    check_time_major(valid=valid, ended=ended, relative_lengths=relative_lengths)
    check_masks(valid=valid, ended=ended)
    check_name("aggregation", aggregation, get_args(Aggregation))
    mask = valid.float()
    if aggregation == "step-mean":
        return mask, mask
    lengths = episode_lengths(valid, ended)
    if aggregation == "trajectory-mean":
        return mask / lengths, mask / lengths
    relative = lengths / valid.shape[0] if relative_lengths is None else relative_lengths
    # A count above 1 for each valid entry: together they count the invalid ones, by which RLinf divides too.
    return mask / relative, mask * (mask.numel() / mask.sum().clamp(min=1.0))


def normalize_masked(values: Tensor, mask: Tensor, eps: float = 1e-8, std: Deviation = "unbiased") -> Tensor:
    """Return (values - mean) / (std + eps) with the statistics of the n entries in `mask`. The result is 0 outside the
    mask, and everywhere if these entries are all equal.

    Args:
        std: "unbiased" divides the sum of squared differences by n - 1, "population" by n (AcceRL, eq. 6).
    """
    check_name("std", std, get_args(Deviation))
    check_shapes(values=values, mask=mask)
    check_masks(mask=mask)
    zeros = torch.zeros_like(values)
    check_finite(values=torch.where(mask, values, zeros))
    inside = values[mask]
    if all_equal(inside):
        return zeros
    deviation = inside.std(unbiased=std == "unbiased")
    # AcceRL's epsilon; that of `group_advantages` is RLinf's and siiRL's, and larger.
    return torch.where(mask, (values - inside.mean()) / (deviation + eps), zeros)


# ------------------------------------------------------------------------------------------------- advantages


def discounted_returns(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, *, gamma: float
) -> Tensor:
    """Compute R_t = r_t + gamma * R_{t+1}, cut after a termination; a truncation and the last entry bootstrap from
    next_values. Arguments and shapes are those of `gae`; the result equals its returns for lam = 1, for any values.

    Returns: float [S, N].
    """
    values = torch.zeros_like(rewards)
    return gae(rewards, values, next_values, terminated, truncated, gamma=gamma, lam=1.0)[1]


def checked_steps(
    next_values: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor | None, **steps: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Check and mask the [S, N] inputs of `gae` and `v_trace`. Return (`valid`, all True if it is None; the
    steps, 0 where not valid). Raise ShapeError, and NotFiniteError as `gae` does."""
    check_time_major(**steps, next_values=next_values, terminated=terminated, truncated=truncated, valid=valid)
    check_masks(terminated=terminated, truncated=truncated, valid=valid)
    valid = torch.ones_like(terminated) if valid is None else valid
    masked = {name: torch.where(valid, tensor, torch.zeros_like(tensor)) for name, tensor in steps.items()}
    check_finite(**masked, next_values=next_values)
    return valid, list(masked.values())


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    lam: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates; terminations are no truncations (Schulman et al. 2016, eq. 11-16):

        delta_t = r_t + gamma * V_{t+1} * (1 - terminated_t) - V_t
        A_t = delta_t + gamma * lam * (1 - ended_t) * A_{t+1}

    Args:
        rewards, values: float [S, N], time-major.
        next_values: float [S, N]: read where an entry is truncated (value of the episode's *final* observation) and
            in the last entry (value of the next observation); elsewhere V_{t+1} = values[t + 1].
        terminated, truncated: bool [S, N]; ended = terminated | truncated.
        valid: bool [S, N]: entries where it is False are skipped, whatever they hold: t + 1 is the next valid one
            (None: all are valid). A column whose last entries are not valid continues in the next_values of the last.

    Returns: (advantages, returns = advantages + values), float [S, N]; 0 where not valid. Raises NotFiniteError for NaN
    or infinity in valid entries, and anywhere in next_values.
    """
    valid, (rewards, values) = checked_steps(next_values, terminated, truncated, valid, rewards=rewards, values=values)
    zero = torch.zeros_like(rewards)
    if not len(rewards):
        return zero, zero.clone()
    ended = terminated | truncated
    advantages = torch.zeros_like(rewards)
    running, following = zero[0], next_values[-1]  # A_{t+1}, V_{t+1}
    for t in reversed(range(rewards.shape[0])):
        after = torch.where(ended[t], next_values[t], following) * (~terminated[t]).float()
        delta = rewards[t] + gamma * after - values[t]
        now = delta + gamma * lam * (~ended[t]).float() * running
        running, following = torch.where(valid[t], now, running), torch.where(valid[t], values[t], following)
        advantages[t] = torch.where(valid[t], now, zero[t])
    return advantages, advantages + values


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
    """Compute V-trace advantages and targets (Espeholt et al. 2018, eq. 1, section 4.2, remark 2), ends as in `gae`:

        rho_t = min(rho_bar, pi_old / mu)      c_t = lam * min(c_bar, pi_old / mu)
        v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
        A_t = rho_t (r_t + gamma v_{t+1} - V_t)

    After a termination the value is 0; after a truncation, and after the last entry, v_{t+1} is V_{t+1}. With weights
    of 1 the v_t are GAE's returns, and for lam = 1 the A_t are its advantages: n-step returns minus V_t.

    Args:
        rewards ... truncated, valid: as in `gae`.
        log_weights: float [S, N], log(pi_old / mu) of each entry.

    Returns: (advantages A, value targets v), float [S, N]; 0 where not valid. Raises as `gae` does.
    """
    valid, (rewards, values, log_weights) = checked_steps(
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


def all_equal(scores: Tensor) -> bool:
    """Return whether there is nothing to compare: fewer than two scores, or all equal up to the rounding of sums (1e-6
    of the largest), which a division by their std would amplify."""
    return len(scores) < 2 or bool(scores.max() - scores.min() <= EQUAL * scores.abs().max())


def group_advantages(
    scores: Tensor,
    groups: Tensor,
    *,
    normalize_by_std: Literal["group", "step"] | None = "group",
    baseline: Literal["mean", "leave-one-out"] = "mean",
    eps: float = 1e-6,
) -> Tensor:
    """Compute GRPO advantages (Shao et al. 2024): (score - mean of its group) / (unbiased std of its group + eps); 0 in
    a group of one and in a group of equal scores.

    `normalize_by_std=None` is Dr. GRPO (Liu et al. 2025). With `baseline="leave-one-out"`, the mean of the *others*,
    that is RLOO (Ahmadian et al. 2024). `normalize_by_std="step"` divides score - mean of its group by the std over all
    N instead, which is REINFORCE++ with baseline (Hu et al. 2025).

    Args:
        scores: float [N].
        groups: int64 [N], equal numbers are one group.

    Returns: float [N]. Raises NotFiniteError for NaN or infinity in the scores.
    """
    check_shapes(scores=scores, groups=groups)
    check_finite(scores=scores)
    check_name("baseline", baseline, ("mean", "leave-one-out"))
    if normalize_by_std is not None:
        check_name("normalize_by_std", normalize_by_std, ("group", "step"))
    out = torch.zeros_like(scores)
    for group in groups.unique():
        members = groups == group
        inside = scores[members]
        if all_equal(inside):
            continue
        advantages = inside - inside.mean()
        if baseline == "leave-one-out":  # s - (sum - s) / (n - 1) = n / (n - 1) * (s - mean)
            advantages = advantages * (len(inside) / (len(inside) - 1))
        out[members] = advantages / (inside.std() + eps) if normalize_by_std == "group" else advantages
    if normalize_by_std != "step":
        return out
    return normalize_masked(out, torch.ones_like(out, dtype=torch.bool), eps)


# ----------------------------------------------------------------------------------------------------- losses


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log r = lp - lp_old, clamped to +-20 so that exp stays finite."""
    check_shapes(log_probs=log_probs, old_log_probs=old_log_probs)
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


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
    share = expand_to(age / (age + 1), log_probs)
    return (behaviour_log_probs + share * (log_probs - behaviour_log_probs)).detach()


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's clipped surrogate per loss term, to be minimised: max(-A r, -A clip(r, 1 - low, 1 + high)), with
    r = exp(lp - lp_old) (Schulman et al. 2017, eq. 7). `low != high` is the clip-higher of DAPO (Yu et al. 2025).

    Args:
        log_probs, old_log_probs, advantages: one shape; gradients flow through the first only.
        dual_clip: c > 1 bounds the loss by -A c where A < 0 (Ye et al. 2020).
    """
    check_shapes(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss


@torch.no_grad()
def find_clipped(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return the terms of `clipped_surrogate` that a clip keeps constant, so that they have no gradient (bool): A > 0
    above 1 + high, A < 0 below 1 - low, and A < 0 above dual_clip."""
    check_shapes(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    ratio = log_ratio(log_probs, old_log_probs).exp()
    # A dual clip bounds the loss from above, which for A < 0 is where the ratio is large: the other end of `low`.
    below = ratio < 1 - low if dual_clip is None else (ratio < 1 - low) | (ratio > dual_clip)
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & below)


def soft_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, positive: float, negative: float
) -> Tensor:
    """Return SAPO's surrogate per loss term, to be minimised: -A (4 / tau) sigmoid(tau (r - 1)), where tau is
    `positive` for A > 0, else `negative` (Gao et al. 2025, eq. 6). Its gradient is that of -A r at r = 1 and fades.

    Args:
        log_probs, old_log_probs, advantages: one shape; gradients flow through the first only.
    """
    check_shapes(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    tau = torch.where(advantages > 0, positive, negative)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (log_ratio(log_probs, old_log_probs).exp() - 1))


def trust_weights(log_probs: Tensor, old_log_probs: Tensor, *, sigma: float) -> Tensor:
    """Return GIPO's trust weights w = exp(-(log r / sigma)^2 / 2) without gradient (AcceRL, eq. 8); 1 on-policy."""
    return (-0.5 * (log_ratio(log_probs, old_log_probs).detach() / sigma).square()).exp()


def trust_surrogate(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, sigma: float) -> Tensor:
    """Return GIPO's surrogate per loss term, to be minimised: -sg(w) r A with trust weights w (AcceRL, eq. 9).

    Args:
        log_probs, old_log_probs, advantages: one shape; gradients flow through the first only.
        sigma: width of the trust region in log r. PPO's clip removes the gradient outside; this damps it smoothly.
    """
    check_shapes(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    ratio = log_ratio(log_probs, old_log_probs).exp()
    return -trust_weights(log_probs, old_log_probs, sigma=sigma) * ratio * advantages


def kl_estimate(log_probs: Tensor, other_log_probs: Tensor, estimator: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimate KL(pi || other) per loss term from samples of pi (Schulman 2020): with d = lp_other - lp, k1 = -d,
    k2 = d^2 / 2, k3 = exp(d) - 1 - d."""
    d = log_ratio(other_log_probs, log_probs)
    check_name("estimator", estimator, ("k1", "k2", "k3"))
    if estimator == "k1":
        return -d
    return d.square() / 2 if estimator == "k2" else d.exp() - 1 - d


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None, huber_delta: float | None
) -> Tensor:
    """Return the critic's loss per term: max(h(R - v), h(R - v_clip)), v_clip = v_old + clip(v - v_old, -c, c).

    Args:
        values, returns, old_values: one shape; gradients flow through the first only.
        clip: c; None: no clipping.
        huber_delta: h is Huber's loss with this delta; None: half the squared error.
    """
    check_shapes(values=values, returns=returns, old_values=old_values)

    def penalise_error(error: Tensor) -> Tensor:
        if huber_delta is None:
            return error.square() / 2
        small = error.abs() <= huber_delta
        return torch.where(small, error.square() / 2, huber_delta * (error.abs() - huber_delta / 2))

    loss = penalise_error(returns - values)
    if clip is not None:
        loss = torch.maximum(loss, penalise_error(returns - (old_values + (values - old_values).clamp(-clip, clip))))
    return loss


@torch.no_grad()
def value_clipped(
    values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None, huber_delta: float | None
) -> Tensor:
    """Return the terms of `value_loss` whose value moved further than the clip and whose clipped branch is larger, so
    that the value has no gradient (bool). Inside the clip the branches differ by rounding alone."""
    loss = value_loss(values, returns, old_values, clip=clip, huber_delta=huber_delta)
    moved = (values - old_values).abs() > (math.inf if clip is None else clip)
    return moved & (loss > value_loss(values, returns, old_values, clip=None, huber_delta=huber_delta))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - var(R - v) / var(R) over the entries in `mask`; 0 if the returns do not vary."""
    check_shapes(values=values, returns=returns, mask=mask)
    check_masks(mask=mask)
    inside = returns[mask]
    if all_equal(inside):
        return 0.0
    return 1.0 - float((inside - values[mask]).var() / inside.var())
