"""Settings of `classifier`."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen

from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import at
from vla_rl.toolkit.reward_models.folder import read_shape


@frozen(kw_only=True)
class ClassifierConfig:
    """Spec keys of the reward model `classifier`."""

    folder: Path = field()
    """Folder that `vla-rl fit-rewards` wrote."""


def check_folder(config: ClassifierConfig, context: CheckContext) -> None:
    """Raise UserError for a folder that `vla-rl fit-rewards` did not write. The weights are not loaded."""
    with at("folder"):
        read_shape(config.folder)
