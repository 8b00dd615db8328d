"""Policy gradients, in the order in which numbers pass through: settings, advantages and returns, ratios and off-policy
corrections, surrogate, value loss, regularisers, aggregation, metrics. The settings stand beside what they set, and the
formulas, each with its source, in `functional.py`. An algorithm's own file puts the parts together.

Three policies take part: the behaviour policy mu, whose log-probs are recorded; the proximal policy pi_old, at the
start of the training step; and the policy in training, pi. PPO's ratio pi / pi_old says how far an update went; the
weight pi_old / mu says how old the data are. On data of the newest version pi_old is mu.

Dimensions: T chunk steps, N trajectories, C actions in a chunk, M tokens in an action, B samples of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.samples import by_action, by_chunk
from vla_rl.core.types import Advantages, AdvantageScope, Batch, Loss, Requirements, Rollout, Scores, Statistic
from vla_rl.toolkit.algorithms.checks import Aggregation, Deviation, Granularity, ShapeError, check_finite, check_shapes
from vla_rl.toolkit.lazy_imports import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vla_rl.toolkit.algorithms import functional as F
    from vla_rl.toolkit.algorithms import statistics
else:  # specs are read with the settings below, without torch; so no function here has a decorator of torch
    torch = LazyModule("torch")
    F = LazyModule("vla_rl.toolkit.algorithms.functional")
    statistics = LazyModule("vla_rl.toolkit.algorithms.statistics")

LARGEST = 1e6
"""Upper limit of coefficients and bounds of the losses, which are of the order of 1."""
RLINF_REASON = (
    "aggregation: rlinf weighs by its longest trajectory; set algorithm.aggregation: step-mean or trajectory-mean"
)


@frozen(kw_only=True, slots=False)
class PolicySettings:
    """Settings of every policy loss. An algorithm's config class inherits this and what else it needs of the settings
    below; docs/reference/algorithms.md has each key's equation and use."""

    log_prob: Granularity = "token"
    """Granularity of the probability ratio."""
    entropy_coef: float = field(default=0.0, validator=[v.ge(0), v.le(LARGEST)])
    """Weight of the entropy bonus, at the granularity of the ratio."""
    kl: KLSettings | None = None
    """KL divergence from the reference policy in the loss; null: none. The model has to offer `reference_log_probs`
    (openvla and openvla_oft with `lora`: the same network without the adapters)."""

    @property
    def needs(self) -> Requirements:
        """Inputs that these keys require from the runtime, for `Algorithm.needs`."""
        return Requirements(reference=self.kl is not None)

    @property
    def scope_reason(self) -> str:
        """The key that makes advantages depend on the whole step, for `Algorithm.scope_reason`; "" if none does."""
        return ""

    @property
    def advantage_scope(self) -> AdvantageScope:
        """STEP if there is such a reason, for `Algorithm.advantage_scope`."""
        return AdvantageScope.STEP if self.scope_reason else AdvantageScope.GROUP


class PolicyGradientAlgorithm(Algorithm):
    """An algorithm whose declarations to the runtime follow from its settings."""

    def __init__(self, config: PolicySettings, context: AlgorithmContext | None = None) -> None:
        self.config = config
        self.needs = config.needs
        self.scope_reason = config.scope_reason
        self.advantage_scope = config.advantage_scope
        self.off_policy = config.off_policy if isinstance(config, CorrectionSettings) else self.off_policy
        self.value_granularity = config.advantage if isinstance(config, CriticSettings) else "chunk"


# ------------------------------------------------------------------------------- advantages and returns, with a critic


@frozen(kw_only=True, slots=False)
class CriticSettings(PolicySettings):
    """Settings of advantages and losses with a critic."""

    gamma: float = field(default=0.99, validator=[v.gt(0), v.le(1)])
    """Discount per step of the reward's granularity (a chunk, or an action)."""
    lam: float = field(default=0.95, validator=[v.ge(0), v.le(1)])
    """Lambda of GAE and of V-trace."""
    advantage: Literal["chunk", "action"] = field(default="chunk")
    """Granularity of rewards, values and advantages. action with log_prob chunk is refused: the ratio of a whole chunk
    cannot carry an advantage per action (RLinf-VLA Table 2)."""
    time_limit: Literal["bootstrap", "terminal", "always"] = "bootstrap"
    """An episode that hits its limit bootstraps from the value of its final observation, or ends there with value 0. If
    success must come within the limit, terminal keeps the policy from stalling. With always, episodes that terminated
    bootstrap too, as RLinf's `bootstrap_type: always` does."""
    normalize_advantages: Deviation | None = "unbiased"
    """Normalise advantages to zero mean and unit std over all valid entries of the whole rollout, whatever ranks train
    on it. The std divides by n - 1 (unbiased; RLinf, siiRL) or by n (population; AcceRL). Null: they stay as they
    are."""
    aggregation: Aggregation = "step-mean"
    """Average over loss terms."""
    value_coef: float = field(default=0.5, validator=[v.ge(0), v.le(LARGEST)])
    """Weight of the critic's loss."""
    value_clip: float | None = field(default=0.2, validator=v.optional(v.gt(0)))  # type: ignore[arg-type]
    """Distance that a value may move from its rollout value before the clipped branch counts; null: off."""
    huber_delta: float | None = field(default=10.0, validator=v.optional(v.gt(0)))  # type: ignore[arg-type]
    """Errors above this are penalised linearly (Huber); null: squared error."""

    @advantage.validator
    def _allowed_pair(self, _: object, advantage: str) -> None:
        if advantage == "action" and self.log_prob == "chunk":
            raise ValueError("advantage: action cannot be used with log_prob: chunk; use log_prob: action or token")

    @property
    def needs(self) -> Requirements:
        """Values, and with `time_limit: always` those after terminations."""
        return super().needs | Requirements(values=True, terminal_values=self.time_limit == "always")

    @property
    def scope_reason(self) -> str:
        """Normalisation over the whole step, or RLinf's aggregation."""
        if self.normalize_advantages:
            return "advantages are normalised over all of it; set algorithm.normalize_advantages: null"
        return RLINF_REASON if self.aggregation == "rlinf" else ""


def flatten_steps(rollout: Rollout, settings: CriticSettings) -> dict[str, Tensor]:
    """Return the rollout as arguments of `functional.gae`: [S, N] with S = T chunk steps, whose valid rewards are
    summed, or S = T * C actions. Episodes end as `time_limit` reads it."""
    assert rollout.values is not None and rollout.next_values is not None  # the runtime provides what `needs` names
    terminated, truncated = rollout.terminated, rollout.truncated
    none = torch.zeros_like(truncated)
    if settings.time_limit == "terminal":
        terminated, truncated = terminated | truncated, none
    elif settings.time_limit == "always":
        terminated, truncated = none, terminated | truncated
    if settings.advantage == "chunk":
        return {
            "rewards": torch.where(rollout.valid, rollout.rewards, torch.zeros(())).sum(-1),
            "values": rollout.values,
            "next_values": rollout.next_values,
            "terminated": terminated.any(-1),
            "truncated": truncated.any(-1),
            "valid": rollout.samples,
        }
    return {
        "rewards": by_action(rollout.rewards),
        "values": by_action(rollout.values),
        # One bootstrap value per chunk stands at each of its actions, where only the one that ends an episode reads it.
        "next_values": rollout.next_values.repeat_interleave(rollout.valid.shape[-1], dim=0),
        "terminated": by_action(terminated),
        "truncated": by_action(truncated),
        "valid": by_action(rollout.valid),
    }


def gae_advantages(rollout: Rollout, settings: CriticSettings) -> Advantages:
    """Return generalised advantages (GAE) of chunk steps or of actions, as `critic_advantages` does."""
    flat = F.gae(**flatten_steps(rollout, settings), gamma=settings.gamma, lam=settings.lam)
    return critic_advantages(rollout, settings, *(_unflatten_steps(tensor, rollout, settings) for tensor in flat))


def v_trace_advantages(rollout: Rollout, settings: CriticSettings, correction: VTrace) -> Advantages:
    """Return V-trace's advantages and value targets of chunk steps or of actions, as `critic_advantages` does."""
    log_weights = log_behaviour_weights(rollout, settings.advantage)
    flat = F.v_trace(
        **flatten_steps(rollout, settings),
        log_weights=log_weights if settings.advantage == "chunk" else by_action(log_weights),
        rho_bar=correction.rho_bar,
        c_bar=correction.c_bar,
        gamma=settings.gamma,
        lam=settings.lam,
    )
    advantages, targets = (_unflatten_steps(tensor, rollout, settings) for tensor in flat)
    weights = log_weights.exp().clamp(max=correction.rho_bar)
    # Normalised without the weights that they have already: after a subtraction of the mean, actions that pi_old would
    # not take would have a gradient.
    result = critic_advantages(rollout, settings, advantages / weights, targets)
    return attrs.evolve(result, advantages=result.advantages * weights)


def critic_advantages(rollout: Rollout, settings: CriticSettings, advantages: Tensor, returns: Tensor) -> Advantages:
    """Return advantages with the weights of both losses: normalised over the whole rollout if the settings say so.

    Args:
        advantages, returns: in the shape of the rollout's values, [T, N] or [T, N, C].
    """
    assert rollout.values is not None
    mask = rollout.samples if settings.advantage == "chunk" else rollout.valid
    metrics = {
        "value/explained_variance": F.explained_variance(rollout.values, returns, mask),
        "advantage/std": float(advantages[mask].std()) if int(mask.sum()) > 1 else 0.0,
    }
    if settings.normalize_advantages is not None:
        advantages = F.normalize_masked(advantages, mask, std=settings.normalize_advantages)
    weights, counts = policy_weights(rollout, settings)
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


def _unflatten_steps(flat: Tensor, rollout: Rollout, settings: CriticSettings) -> Tensor:
    """Return [S, N] in the shape of the rollout's values."""
    return flat if settings.advantage == "chunk" else by_chunk(flat, rollout.valid.shape[-1])


# ----------------------------------------------------------------------------------- advantages, relative to a group


@frozen(kw_only=True)
class SuccessFilter:
    """Keep a group only if its mean success is in [lower, upper] (RLinf-VLA 4.3.3)."""

    lower: float = field(default=0.1, validator=[v.ge(0), v.le(1)])
    """Lowest mean success of a group that is kept, in [0, 1]."""
    upper: float = field(default=0.9, validator=[v.ge(0), v.le(1)])
    """Highest mean success of a group that is kept, in [0, 1]."""

    @upper.validator
    def _check_bounds(self, _: object, upper: float) -> None:
        if self.lower > upper:
            raise ValueError(f"filter.lower ({self.lower}) is above filter.upper ({upper})")


@frozen(kw_only=True, slots=False)
class GroupSettings(PolicySettings):
    """Settings of advantages relative to a group of trajectories that started from one state."""

    aggregation: Aggregation = "trajectory-mean"
    """Average over loss terms; trajectory-mean weighs every trajectory equally (RLinf-VLA eq. 12)."""
    baseline: Literal["mean", "leave-one-out"] = "mean"
    """Baseline of a score: the mean of its group, or of the others in its group (RLOO)."""
    normalize_by_std: Literal["group", "step"] | None = "group"
    """Scores by whose standard deviation advantages are divided: those of the group, or those of all trajectories of
    the step, each minus its group's baseline (REINFORCE++ with baseline). Null: no division (Dr. GRPO, and RLOO with
    leave-one-out)."""
    filter: SuccessFilter | None = None
    """Success-rate filter of groups; null: off."""
    filter_identical: bool = True
    """Drop groups whose scores are all equal; they have no gradient."""
    filter_truncated: bool = False
    """Drop groups in which any member hit the step limit."""

    @property
    def drops_groups(self) -> bool:
        """Whether any group may be dropped."""
        return self.filter is not None or self.filter_identical or self.filter_truncated

    @property
    def needs(self) -> Requirements:
        """At least two trajectories in each group."""
        return super().needs | Requirements(groups=True)

    @property
    def scope_reason(self) -> str:
        """A std of the whole step, or RLinf's aggregation."""
        if self.normalize_by_std == "step":
            return "advantages are divided by a std over all of it; set algorithm.normalize_by_std: group"
        return RLINF_REASON if self.aggregation == "rlinf" else ""


def trajectory_scores(rollout: Rollout) -> Tensor:
    """Return the sum of the rewards of each column's first episode, float32 [N]."""
    first = F.valid_until_end(by_action(rollout.terminated | rollout.truncated))
    rewards = torch.where(first, by_action(rollout.rewards), torch.zeros(()))
    check_finite(rewards=rewards)
    return rewards.sum(0)


def select_groups(rollout: Rollout, settings: GroupSettings) -> Tensor:
    """Return the trajectories that the settings' filters keep, bool [N]. A group is kept or dropped as a whole."""
    truncated = rollout.truncated.any(-1).any(0)
    scores = trajectory_scores(rollout)
    keep = torch.ones_like(truncated)
    for group in rollout.groups.unique():
        members = rollout.groups == group
        success = float(rollout.success[members].double().mean())
        bounds = settings.filter
        if (
            (bounds is not None and not bounds.lower <= success <= bounds.upper)
            or (settings.filter_identical and F.all_equal(scores[members]))
            or (settings.filter_truncated and bool(truncated[members].any()))
        ):
            keep[members] = False
    return keep


def group_relative_advantages(rollout: Rollout, settings: GroupSettings) -> Advantages:
    """Return each trajectory's score relative to its group's at valid chunk steps, loss weights, and score metrics."""
    scores, groups, samples = trajectory_scores(rollout), rollout.groups, rollout.samples
    baseline = settings.baseline
    relative = F.group_advantages(scores, groups, baseline=baseline, normalize_by_std=settings.normalize_by_std)
    above = F.group_advantages(scores, groups, baseline=baseline, normalize_by_std=None)
    weights, counts = policy_weights(rollout, settings)
    return Advantages(
        advantages=torch.where(samples, relative.expand(samples.shape), torch.zeros(())),
        weights=weights,
        counts=counts,
        metrics={
            "advantage/score_mean": float(scores.mean()) if len(scores) else 0.0,
            "advantage/std": float(above.std()) if len(scores) > 1 else 0.0,
        },
    )


# -------------------------------------------------------------------------------- ratios, and corrections of old data


@frozen(kw_only=True)
class Decoupled:
    """Weights pi_old / mu on the surrogate of pi / pi_old."""

    type: Literal["decoupled"] = "decoupled"
    proximal: Literal["forward", "interpolate"] = "forward"
    """Source of the log-probs of pi_old, the policy at the start of the training step: a forward pass over data of
    older versions (forward), or an interpolation between mu and pi at no cost (interpolate; A-3PO)."""
    threshold: float | None = field(default=None, validator=v.optional(v.and_(v.ge(1), v.le(LARGEST))))
    """Loss terms with pi_old / mu above it are dropped; null: none."""

    def compute_factors(self, weights: Tensor) -> Tensor:
        """Return the factors on the surrogate from weights pi_old / mu: 0 above the threshold."""
        if self.threshold is None:
            return weights
        return torch.where(weights <= self.threshold, weights, torch.zeros_like(weights))


@frozen(kw_only=True)
class Truncated:
    """Bounded weights pi_old / mu on the surrogate of pi / pi_old."""

    type: Literal["truncated"] = "truncated"
    proximal: Literal["forward", "interpolate"] = "forward"
    """Source of the log-probs of pi_old, as for decoupled."""
    threshold: float = field(default=2.0, validator=[v.ge(1), v.le(LARGEST)])
    """Largest weight; larger ones are set to it."""

    def compute_factors(self, weights: Tensor) -> Tensor:
        """Return the factors on the surrogate from weights pi_old / mu: at most the threshold."""
        return weights.clamp(max=self.threshold)


@frozen(kw_only=True)
class VTrace:
    """Weighted advantages and value targets, for algorithms with a critic."""

    type: Literal["v-trace"] = "v-trace"
    proximal: ClassVar[Literal["forward"]] = "forward"
    threshold: ClassVar[None] = None
    rho_bar: float = field(default=1.0, validator=[v.gt(0), v.le(LARGEST)])
    """Largest weight pi_old / mu of an advantage; it determines what the critic converges to."""
    c_bar: float = field(default=1.0, validator=v.gt(0))
    """Largest weight of later value targets in an earlier one; at most rho_bar."""

    @c_bar.validator
    def _check_bars(self, _: object, c_bar: float) -> None:
        if c_bar > self.rho_bar:
            raise ValueError(f"c_bar ({c_bar}) is above rho_bar ({self.rho_bar}); lower it, or raise rho_bar")

    def compute_factors(self, weights: Tensor) -> Tensor:
        """Return factors of 1: the advantages are weighted already."""
        return torch.ones_like(weights)


@frozen(kw_only=True, slots=False)
class CorrectionSettings(PolicySettings):
    """Settings for data collected by an older version of the policy."""

    correction: Decoupled | Truncated | VTrace | None = None
    """Off-policy correction; null: none (plain PPO, whose clip then mistakes age for progress)."""

    @property
    def off_policy(self) -> bool:
        """Whether the loss corrects for the age of the data, for `Algorithm.off_policy`."""
        return self.correction is not None

    @property
    def needs(self) -> Requirements:
        """Log-probs of pi_old unless they are interpolated, and for V-trace the newest critic's values."""
        correction = self.correction
        return super().needs | Requirements(
            proximal_log_probs=correction is not None and correction.proximal == "forward",
            recomputed_values=isinstance(correction, VTrace),
        )


def _correction_of(settings: PolicySettings) -> Decoupled | Truncated | VTrace | None:
    return settings.correction if isinstance(settings, CorrectionSettings) else None


@frozen(kw_only=True, eq=False)
class LossTerms:
    """A micro-batch's loss terms at the granularity of the ratio: "chunk" [B], "action" [B, C] or "token" [B, C, M]."""

    log_probs: Tensor
    """Log-probs of pi, with gradient."""
    behaviour_log_probs: Tensor
    """Log-probs of mu."""
    proximal_log_probs: Tensor
    """Log-probs of pi_old, the denominator of the surrogate's ratio; those of mu without a correction."""
    log_behaviour_weights: Tensor | None
    """log(pi_old / mu), clamped to +-20; None without a correction."""
    factors: Tensor
    """Factor on each term's surrogate, >= 0: pi_old / mu as far as the correction keeps it; 1 without one."""
    entropy: Tensor
    """Entropies of pi, with gradient."""
    advantages: Tensor
    """Advantage of the action or chunk that a term belongs to."""
    weights: Tensor
    """Weights within the whole optimiser step; 0 where not valid."""


def loss_terms(scores: Scores, batch: Batch, settings: PolicySettings) -> LossTerms:
    """Return the loss terms: log-probs and entropies are summed to the ratio's granularity, advantages repeated and
    weights divided over finer terms. If pi_old is mu, every correction equals plain PPO bit for bit."""
    level, correction = settings.log_prob, _correction_of(settings)
    log_probs = F.reduce_tokens(scores.log_probs, batch.valid, level)
    mu = F.reduce_tokens(batch.log_probs, batch.valid, level)
    old, log_weights, factors = mu, None, torch.ones_like(mu)
    if correction is not None:
        if correction.proximal == "interpolate":
            old = F.interpolate_log_probs(log_probs, mu, batch.lag)
        else:
            old = F.reduce_tokens(_require_proximal(batch.proximal_log_probs), batch.valid, level)
        log_weights = F.log_ratio(old, mu)
        factors = correction.compute_factors(log_weights.exp())
    return LossTerms(
        log_probs=log_probs,
        behaviour_log_probs=mu,
        proximal_log_probs=old,
        log_behaviour_weights=log_weights,
        factors=factors,
        entropy=F.reduce_tokens(scores.entropy, batch.valid, level),
        advantages=F.expand_to(batch.advantages, log_probs),
        weights=F.expand_to(batch.weights, log_probs, mean=True),
    )


def log_behaviour_weights(rollout: Rollout, granularity: Granularity) -> Tensor:
    """Return log(pi_old / mu), clamped to +-20, float32 [T, N], [T, N, C] or [T, N, C, M]; 0 where not valid."""
    valid = rollout.valid.flatten(0, 1)
    old, mu = (
        F.reduce_tokens(log_probs.flatten(0, 1), valid, granularity)
        for log_probs in (_require_proximal(rollout.proximal_log_probs), rollout.log_probs)
    )
    weights = F.log_ratio(old, mu)
    return weights.reshape(*rollout.samples.shape, *weights.shape[1:])


def _require_proximal(log_probs: Tensor | None) -> Tensor:
    if log_probs is None:
        raise ShapeError("the correction needs proximal_log_probs; set that field of the algorithm's Requirements")
    return log_probs


# --------------------------------------------------------------------------------------------------------- surrogate


@frozen(kw_only=True, slots=False)
class ClipSettings(PolicySettings):
    """Settings of PPO's clipped surrogate."""

    clip_low: float = field(default=0.2, validator=[v.ge(0), v.lt(1)])
    """Lower clip: ratios below 1 - clip_low get no gradient."""
    clip_high: float = field(default=0.28, validator=[v.gt(0), v.le(LARGEST)])
    """Upper clip: ratios above 1 + clip_high get no gradient (clip-higher, DAPO 2025)."""
    dual_clip: float | None = field(default=None, validator=v.optional(v.and_(v.gt(1), v.le(LARGEST))))
    """Bound on the loss of negative advantages, as a factor; null: off."""


@frozen(kw_only=True, eq=False)
class Surrogate:
    """A surrogate objective around pi_old, to be minimised, in the shape of the loss terms."""

    values: Tensor
    """Surrogate per loss term, with gradient, before factors and weights."""
    clipped: Tensor | None = None
    """Loss terms that PPO's clip keeps, or would keep, constant, bool; None: no term."""
    dead: Tensor | None = None
    """Loss terms without gradient, bool; None: the clipped ones."""
    trust: Tensor | None = None
    """Factor on the ratio in the gradient; None: 1."""


def compute_clipped_surrogate(terms: LossTerms, settings: ClipSettings) -> Surrogate:
    """Return PPO's clipped surrogate (`functional.clipped_surrogate`) with the settings' bounds."""
    low, high, dual = settings.clip_low, settings.clip_high, settings.dual_clip
    triple = (terms.log_probs, terms.proximal_log_probs, terms.advantages)
    return Surrogate(
        values=F.clipped_surrogate(*triple, low=low, high=high, dual_clip=dual),
        clipped=F.find_clipped(*triple, low=low, high=high, dual_clip=dual),
    )


# -------------------------------------------------------------------------------------------------------- value loss


def add_value_loss(policy: Loss, scores: Scores, batch: Batch, settings: CriticSettings) -> Loss:
    """Return the policy's loss plus value_coef times the critic's, the weighted sum of `functional.value_loss`."""
    if scores.values is None or batch.values is None or batch.returns is None or batch.value_weights is None:
        raise ShapeError("the critic's loss needs values, returns and value weights; the model or the rollout has none")
    triple = (scores.values, batch.returns, batch.values)
    clip, delta = settings.value_clip, settings.huber_delta
    loss = F.weighted_sum(F.value_loss(*triple, clip=clip, huber_delta=delta), batch.value_weights)
    clipped = F.value_clipped(*triple, clip=clip, huber_delta=delta).float()
    clip_fraction = statistics.Mean.of(clipped, batch.value_weights > 0)
    return attrs.evolve(
        policy,
        total=policy.total + settings.value_coef * loss,
        metrics={**policy.metrics, "loss/value": loss.detach()},
        statistics={**policy.statistics, "value/clip_fraction": clip_fraction},
    )


# ------------------------------------------------------------------------------------------------------ regularisers


@frozen(kw_only=True)
class KLSettings:
    """KL divergence from the reference policy, at the granularity of the ratio."""

    coef: float = field(validator=v.and_(v.gt(0.0), v.le(LARGEST)))
    """Weight of the divergence in the loss."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the sampled tokens (Schulman 2020)."""


def add_regularisers(
    surrogate: Tensor, terms: LossTerms, batch: Batch, settings: PolicySettings
) -> tuple[Tensor, Tensor | None]:
    """Return (the surrogate minus the entropy bonus plus the KL term, the divergence from the reference policy), one
    number per loss term. The divergence is None without a KL term."""
    objective, kl = surrogate, None
    if settings.entropy_coef:
        objective = objective - settings.entropy_coef * terms.entropy
    if settings.kl is not None:
        if batch.reference_log_probs is None:
            raise ShapeError(
                "kl needs the batch's reference_log_probs; set `reference` of the algorithm's Requirements"
            )
        reference = F.reduce_tokens(batch.reference_log_probs, batch.valid, settings.log_prob)
        kl = F.kl_estimate(terms.log_probs, reference, settings.kl.estimator)
        objective = objective + settings.kl.coef * kl
    return objective, kl


# ------------------------------------------------------------------------------------------------------- aggregation


def aggregation_weights(rollout: Rollout, granularity: Granularity, aggregation: Aggregation) -> tuple[Tensor, Tensor]:
    """Return weights and counts of `functional.loss_weights` as the ratio's: "chunk" [T, N], else [T, N, C]."""
    ended, chunk = rollout.terminated | rollout.truncated, rollout.valid.shape[-1]
    if granularity == "chunk":
        actions = by_chunk(F.episode_lengths(by_action(rollout.valid), by_action(ended)), chunk)
        relative = actions[..., 0] / (len(actions) * chunk)  # length of the episode in which the chunk begins
        return F.loss_weights(rollout.samples, ended.any(-1), aggregation, relative)
    weights, counts = F.loss_weights(by_action(rollout.valid), by_action(ended), aggregation)
    return by_chunk(weights, chunk), by_chunk(counts, chunk)


def policy_weights(rollout: Rollout, settings: CriticSettings | GroupSettings) -> tuple[Tensor, Tensor]:
    """Return weights and counts of the policy's loss terms. Terms that the correction drops are left out of the counts,
    so that the loss is a mean over the others, as in RLinf."""
    weights, counts = aggregation_weights(rollout, settings.log_prob, settings.aggregation)
    correction = _correction_of(settings)
    # Two cases keep the divisor: "rlinf" divides by the number of all terms, and with interpolation the dropped terms
    # are known only in the loss.
    threshold = None
    if isinstance(correction, Decoupled) and correction.proximal == "forward" and settings.aggregation != "rlinf":
        threshold = correction.threshold
    if threshold is not None:
        kept = (log_behaviour_weights(rollout, settings.log_prob).exp() <= threshold).float()
        counts = counts * (kept.mean(-1) if settings.log_prob == "token" else kept)
    return weights, counts


def policy_loss(terms: LossTerms, surrogate: Surrogate, batch: Batch, settings: PolicySettings) -> Loss:
    """Return the policy's loss: the surrogate with the correction's factors, minus the entropy bonus plus the KL term,
    summed over the loss terms by their weights, with the metrics that every policy loss reports."""
    weighted = terms.factors * surrogate.values
    objective, kl = add_regularisers(weighted, terms, batch, settings)
    maxima, means = policy_metrics(terms, surrogate, batch, settings, kl)
    return Loss(
        total=F.weighted_sum(objective, terms.weights),
        metrics={"loss/policy": F.weighted_sum(weighted, terms.weights).detach()},
        maxima=maxima,
        statistics=means,
    )


# ----------------------------------------------------------------------------------------------------------- metrics


def policy_metrics(
    terms: LossTerms, surrogate: Surrogate, batch: Batch, settings: PolicySettings, kl: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Statistic]]:
    """Return (`maxima`, `statistics`) of a policy loss, `kl` being the divergence from the reference policy. Each loss
    term counts once, whatever its weight. Ratios and lags are those to mu, the clip's share is that of pi / pi_old."""
    correction, mean, quantiles = _correction_of(settings), statistics.Mean.of, statistics.RatioQuantiles.of
    with torch.no_grad():
        check_shapes(log_probs=terms.log_probs, clipped=surrogate.clipped, dead=surrogate.dead, trust=surrogate.trust)
        mask = terms.weights > 0
        clipped = torch.zeros_like(mask) if surrogate.clipped is None else surrogate.clipped
        log_ratio = F.log_ratio(terms.log_probs, terms.behaviour_log_probs)
        ratio = log_ratio.exp()
        gradient_factors = ratio if surrogate.trust is None else surrogate.trust * ratio
        cut = log_ratio.abs() >= F.LOG_RATIO_LIMIT
        dead = clipped if surrogate.dead is None else surrogate.dead
        acted, lag = batch.valid.any(-1), batch.lag.float()
        result: dict[str, Statistic] = {"policy/entropy": mean(terms.entropy, mask)}
        if kl is not None:
            result["policy/kl_reference"] = mean(kl, mask)
        if terms.log_behaviour_weights is not None:
            behaviour_weights = terms.log_behaviour_weights.exp()
            # Of pi / mu = (pi_old / mu) (pi / pi_old) the correction leaves its own factor in place of pi_old / mu.
            gradient_factors = terms.factors / behaviour_weights * gradient_factors
            result["policy/behaviour_weight"] = quantiles(terms.log_behaviour_weights, mask)
            if correction is not None and correction.threshold is not None:
                result["policy/behaviour_cut"] = mean((behaviour_weights > correction.threshold).float(), mask)
        result |= {
            "policy/approx_kl": mean(F.kl_estimate(terms.behaviour_log_probs, terms.log_probs, "k3"), mask),
            "loss/clip_fraction": mean(clipped.float(), mask),
            "policy/dead_gradients": mean((dead | (terms.factors == 0) | cut).float(), mask),
            "policy/ratio_cut": mean(cut.float(), mask),
            "policy/ratio": quantiles(log_ratio, mask),
            "policy/effective_sample_size": statistics.EffectiveSize.of(gradient_factors, mask),
            "policy/lag_mean": mean(lag, acted),
        }
        maxima = {
            "policy/ratio_max": torch.where(mask, ratio, torch.zeros_like(ratio)).max(),
            "policy/lag_max": torch.where(acted, lag, torch.zeros_like(lag)).max(),
        }
    return maxima, result


def recompute_kl(scores: Scores, batch: Batch) -> Statistic:
    """Estimate KL(acting || recomputed) in nats per token (k3 of Schulman 2020), over the samples that the learner's
    own weights sampled. It is 0 where acting and learning compute the same."""
    # By expm1 in float64, unlike `functional.kl_estimate`: what it measures is as small as that one's own rounding.
    log_ratio = (scores.log_probs.detach() - batch.log_probs).double()
    same_weights = batch.valid & (batch.lag == 0)[:, None]
    return statistics.Mean.of(torch.expm1(log_ratio) - log_ratio, same_weights[..., None].expand_as(log_ratio))
