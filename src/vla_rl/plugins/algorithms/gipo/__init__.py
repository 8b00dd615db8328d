"""GIPO (AcceRL, arXiv:2603.18464): an actor-critic that damps off-policy samples with Gaussian trust weights instead of
clipping them."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.algorithms.settings import CriticSettings, Deviation


@frozen(kw_only=True)
class GIPOConfig(CriticSettings):
    """Spec keys of `gipo`, with those of CriticSettings."""

    sigma: float = field(default=0.5, validator=v.gt(0))
    """Width of the Gaussian trust region in log r, r the probability ratio, above 0: a ratio of e^sigma gets weight
    0.61 (AcceRL eq. 8). A large sigma means no bound."""
    behaviour_kl_coef: float = field(default=0.0, validator=v.ge(0))
    """Weight (0 or more) of KL(behaviour || current), estimated with k3 from the tokens that the behaviour policy
    sampled; 0: off."""
    advantage_std: Deviation = "population"
    """Standard deviation that advantages are divided by: `population` divides by n (AcceRL eq. 6), `unbiased` by n -
    1."""
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


def build(config: GIPOConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.gipo.impl import GIPO

    return GIPO(config)


PAPER = {  # AcceRL 3.3, eq. 3-10
    "log_prob": "token",
    "advantage": "chunk",
    "gamma": 0.99,
    "lam": 0.95,
    "advantage_std": "population",
    "sigma": 0.5,
    "behaviour_kl_coef": 0.0,
    "recompute_values": True,
    "value_clip": None,
    "huber_delta": None,
    "time_limit": "bootstrap",
    "aggregation": "step-mean",
}
CODE = {**PAPER, "time_limit": "terminal", "value_coef": 1.0, "recompute_values": False}
PRESETS = {
    "paper": PAPER,
    "accerl-minimal": {**CODE, "entropy_coef": 0.01},  # its code, stand-alone version
    "accerl-full": {**CODE, "sigma": 1.0, "behaviour_kl_coef": 0.1, "entropy_coef": 0.0},  # its code, full version
}

SUMMARY = "Gaussian-trust policy optimisation for old samples"
plugin = Plugin(config=GIPOConfig, build=build, summary=SUMMARY, presets=PRESETS)
