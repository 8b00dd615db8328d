"""PPO with a critic on the VLA's hidden state, at chunk or action level."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class PPOConfig:
    gamma: float = field(default=0.99, validator=[v.gt(0), v.le(1)])
    """Discount per entry of the reward's granularity (a chunk, or an action)."""
    lam: float = field(default=0.95, validator=[v.ge(0), v.le(1)])
    """GAE's lambda."""
    clip_low: float = field(default=0.2, validator=[v.ge(0), v.lt(1)])
    """Ratios below 1 - clip_low get no gradient."""
    clip_high: float = field(default=0.28, validator=v.gt(0))
    """Ratios above 1 + clip_high get no gradient."""
    dual_clip: float | None = field(default=None, validator=v.optional(v.gt(1)))
    """Bounds the loss of negative advantages by this factor; null: off."""
    log_prob: Literal["token", "action", "chunk"] = "token"
    """Granularity of the probability ratio."""
    advantage: Literal["chunk", "action"] = field(default="chunk")
    """Granularity of rewards, values and advantages. action with log_prob chunk is refused: a ratio of a whole chunk
    cannot carry an advantage of each action (RLinf-VLA Table 2)."""
    time_limit: Literal["bootstrap", "terminal"] = "bootstrap"
    """An episode that hits its limit goes on in the value of its final observation, or ends there with value 0. Where
    success has to come within the limit, terminal keeps the policy from playing for time."""
    normalize_advantages: bool = True
    """Zero mean and unit std over all valid entries of the rollout."""
    aggregation: Literal["step-mean", "trajectory-mean", "rlinf"] = "step-mean"
    """How entries of the loss are averaged."""
    value_coef: float = field(default=0.5, validator=v.ge(0))
    """Weight of the critic's loss."""
    value_clip: float | None = field(default=0.2, validator=v.optional(v.gt(0)))
    """How far a value may move from its rollout value before the clipped branch counts; null: off."""
    huber_delta: float | None = field(default=10.0, validator=v.optional(v.gt(0)))
    """Errors above are penalised linearly; null: squared error."""
    entropy_coef: float = field(default=0.0, validator=v.ge(0))
    """Weight of the entropy bonus, at the granularity of the ratio."""

    @advantage.validator
    def _allowed_pair(self, _: object, advantage: str) -> None:
        if advantage == "action" and self.log_prob == "chunk":
            raise ValueError("advantage: action cannot be used with log_prob: chunk; use log_prob: action or token")


def build(config: PPOConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.ppo.impl import PPO

    return PPO(config)


plugin = Plugin(config=PPOConfig, build=build, summary="proximal policy optimisation with a critic")
