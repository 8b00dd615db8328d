"""`classifier`: tells success from camera pictures by a small network that `vla-rl fit-rewards` trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import field, frozen

from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class ClassifierConfig:
    """Spec keys of the reward model `classifier`."""

    folder: Path = field()
    """Folder that `vla-rl fit-rewards` wrote."""


def build(config: ClassifierConfig, context: Context) -> Any:
    from vla_rl.plugins.reward_models.classifier.impl import ClassifierRewards

    return ClassifierRewards(config, context)


def check(config: ClassifierConfig, context: Context) -> None:
    from vla_rl.toolkit.reward_models.folder import read_shape

    with at("folder"):
        read_shape(config.folder)


plugin = Plugin(config=ClassifierConfig, build=build, summary="success from camera pictures, learnt", check=check)
