"""Settings of `world_model`."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class WorldModelTrainerConfig:
    """Spec keys of the trainer `world_model`: none, `imagination` has them."""
