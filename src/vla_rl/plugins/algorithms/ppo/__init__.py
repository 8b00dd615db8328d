"""PPO with a critic on the VLA's hidden state, at chunk or action level."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.algorithms.settings import ClipSettings, CorrectionSettings, CriticSettings


@frozen(kw_only=True)
class PPOConfig(CriticSettings, ClipSettings, CorrectionSettings):
    """Keys: those of the three classes above, and two of `correction: v-trace`."""

    rho_bar: float = field(default=1.0, validator=v.gt(0))
    """v-trace: the largest weight pi_old / mu of an advantage; what the critic converges to."""
    c_bar: float = field(default=1.0, validator=v.gt(0))
    """v-trace: the largest weight with which a value target takes in later ones; at most rho_bar."""

    @rho_bar.validator
    @c_bar.validator
    def _of_v_trace(self, _: object, bar: float) -> None:
        if bar != 1.0 and self.correction != "v-trace":
            raise ValueError(f"has no effect with correction: {self.correction}; set correction: v-trace, or remove it")

    @c_bar.validator
    def _ordered(self, _: object, c_bar: float) -> None:
        if c_bar > self.rho_bar:
            raise ValueError(f"c_bar ({c_bar}) is above rho_bar ({self.rho_bar}); lower it, or raise rho_bar")


def build(config: PPOConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.ppo.impl import PPO

    return PPO(config)


PAPER = {  # RLinf-VLA 4.3.2 and Table 3: values of single actions, where a chunk has several
    "log_prob": "token",
    "advantage": "action",
    "gamma": 0.99,
    "lam": 0.95,
    "advantage_std": "unbiased",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "value_clip": 0.2,
    "huber_delta": 10.0,
    "aggregation": "step-mean",
    "entropy_coef": 0.0,
    "kl_coef": 0.0,
}
RLINF = {**PAPER, "value_coef": 1.0}
ASYNC = {  # its maniskill_async_ppo_openvla
    **RLINF,
    "log_prob": "action",
    "clip_low": 0.3,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "correction": "decoupled",
    "proximal": "interpolate",
    "behaviour_weight_threshold": 2.0,
}
PRESETS = {"paper": PAPER, "rlinf": RLINF, "rlinf-async": ASYNC}  # rlinf: its code

plugin = Plugin(config=PPOConfig, build=build, summary="proximal policy optimisation with a critic", presets=PRESETS)
