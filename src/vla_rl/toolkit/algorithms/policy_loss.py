"""The policy's part of a loss: a surrogate objective relative to the proximal policy, entropy and KL terms, and
diagnostics. Algorithms choose the surrogate."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen
from torch import Tensor

from vla_rl.core.types import Batch, Loss, Scores
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.corrections import proximal_policy
from vla_rl.toolkit.algorithms.losses import add_entropy_and_kl, loss_terms, policy_diagnostics
from vla_rl.toolkit.algorithms.settings import ClipSettings, CorrectionSettings


@frozen(kw_only=True, eq=False)
class Surrogate:
    """A surrogate objective, to be minimised, in the shape of the loss terms."""

    values: Tensor
    """Surrogate per loss term, with gradient, before weights."""
    clipped: Tensor
    """Loss terms that a clip keeps constant, so that they have no gradient; bool."""


MakeSurrogate = Callable[[Tensor, Tensor, Tensor], Surrogate]
"""Function (log-probs with gradient, log-probs of the proximal policy, advantages) -> surrogate, all in the shape of
the loss terms."""


def ppo_clip(settings: ClipSettings) -> MakeSurrogate:
    """Return PPO's clipped surrogate (`functional.clipped_surrogate`) with the settings' bounds."""

    def compute_surrogate(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Surrogate:
        low, high, dual = settings.clip_low, settings.clip_high, settings.dual_clip
        triple = (log_probs, old_log_probs, advantages)
        return Surrogate(
            values=F.clipped_surrogate(*triple, low=low, high=high, dual_clip=dual),
            clipped=F.find_clipped(*triple, low=low, high=high, dual_clip=dual),
        )

    return compute_surrogate


def proximal_policy_loss(
    scores: Scores, batch: Batch, settings: CorrectionSettings, make_surrogate: MakeSurrogate
) -> Loss:
    """Compute a policy loss: the surrogate relative to the proximal policy, weighted by `corrections.proximal_policy`,
    minus the entropy bonus plus the KL term, summed over the loss terms by their weights.

    Args:
        scores: by the current weights, with gradient.
        settings: granularity of the ratio, entropy and KL coefficients, off-policy correction.

    Returns: the loss without a critic's part, with the metrics that every policy loss reports.
    """
    entries = loss_terms(scores, batch, settings.log_prob)
    old = proximal_policy(entries, batch, settings)
    surrogate = make_surrogate(entries.log_probs, old.log_probs, entries.advantages)
    weighted = old.weights * surrogate.values
    objective, kl = add_entropy_and_kl(weighted, entries, batch, settings)
    maxima, statistics = policy_diagnostics(
        entries,
        batch,
        clipped=surrogate.clipped,
        dead=surrogate.clipped | old.dropped_terms,
        trust=old.trust_factor,
        reference_kl=kl,
    )
    return Loss(
        total=F.weighted_sum(objective, entries.weights),
        metrics={"loss/policy": F.weighted_sum(weighted, entries.weights).detach()},
        maxima=maxima,
        statistics={**statistics, **old.compute_statistics(entries.valid_mask)},
    )
