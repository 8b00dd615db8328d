"""`policy_gradient`: updates of the policy by the loss of an algorithm (ppo, grpo, gipo, srpo ...)."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from vla_rl.core.types import Context, Plugin, TrainingData


@frozen(kw_only=True)
class PolicyGradientConfig:
    """Spec keys of the trainer `policy_gradient`: none, `train` has them."""


def build(config: PolicyGradientConfig, context: Context) -> Any:
    from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient

    return PolicyGradient(context.training)


plugin = Plugin(
    config=PolicyGradientConfig,
    build=build,
    summary="takes the loss of the spec's algorithm",
    trains_on=TrainingData.TRAJECTORIES,
)
