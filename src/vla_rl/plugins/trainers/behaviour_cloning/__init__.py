"""`behaviour_cloning`: the policy imitates demonstrations."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from vla_rl.core.types import Context, Plugin, TrainingData


@frozen(kw_only=True)
class BehaviourCloningConfig:
    """Spec keys of the trainer `behaviour_cloning`: none, `train` has them."""


def build(config: BehaviourCloningConfig, context: Context) -> Any:
    from vla_rl.plugins.trainers.behaviour_cloning.impl import BehaviourCloning

    return BehaviourCloning(context.training)


plugin = Plugin(
    config=BehaviourCloningConfig, build=build, summary="imitates demonstrations", trains_on=TrainingData.DEMONSTRATIONS
)
