"""Settings of `gipo`."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.paths import read_table
from vla_rl.core.types import Requirements
from vla_rl.toolkit.algorithms.checks import Deviation
from vla_rl.toolkit.algorithms.policy_gradient import CriticSettings

PRESETS = read_table(__file__, "presets.yaml")
"""Preset -> its keys, with their sources."""


@frozen(kw_only=True)
class GIPOConfig(CriticSettings):
    """Spec keys of `gipo`, with those of CriticSettings."""

    sigma: float = field(default=0.5, validator=v.gt(0))
    """Width of the Gaussian trust region in log r, r the probability ratio, above 0: a ratio of e^sigma gets weight
    0.61 (AcceRL eq. 8). A large sigma means no bound."""
    behaviour_kl_coef: float = field(default=0.0, validator=v.ge(0))
    """Weight (0 or more) of KL(behaviour || current), estimated with k3 from the tokens that the behaviour policy
    sampled; 0: off."""
    normalize_advantages: Deviation | None = "population"
    """Normalise advantages to zero mean and unit std over the whole rollout. The std divides by n (population; AcceRL
    eq. 6) or by n - 1 (unbiased). Null: they stay as they are."""
    recompute_values: bool = True
    """Recompute values of all observations, final ones included, with the current critic before advantages are computed
    (AcceRL eq. 3-4)."""
    value_coef: float = field(default=1.0, validator=v.ge(0))
    """Weight (0 or more) of the critic's loss, half the squared error: 1.0 here is 0.5 in AcceRL's code."""
    value_clip: float | None = field(default=None, validator=v.optional(v.gt(0)))
    """Clip range of PPO's value loss, above 0: a value may move this far from its rollout value before the clipped
    branch counts; null: off."""
    huber_delta: float | None = field(default=None, validator=v.optional(v.gt(0)))
    """Threshold of the Huber loss, above 0: larger value errors are penalised linearly; null: squared error."""

    @property
    def needs(self) -> Requirements:
        """Values, recomputed if the key says so."""
        return super().needs | Requirements(recomputed_values=self.recompute_values)
