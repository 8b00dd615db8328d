"""Checks the folder of `classifier` without loading its weights."""

from __future__ import annotations

from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import at
from vla_rl.plugins.reward_models.classifier.config import ClassifierConfig
from vla_rl.toolkit.reward_models.folder import read_shape


def check_folder(config: ClassifierConfig, context: CheckContext) -> None:
    """Raise UserError for a folder that `vla-rl fit-rewards` did not write."""
    with at("folder"):
        read_shape(config.folder)
