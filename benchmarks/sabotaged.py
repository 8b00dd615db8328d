"""`sabotaged`: the world model `edm`, whose imagination is worth nothing on purpose. For `imagination.py` alone: what a
policy learns from it, it learns from something else than the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from attrs import field, frozen

from vla_rl import Noise, Observation, Windows, WorldModel, WorldModelContext, WorldModelPlugin, build, load

ENDS = 0.15
"""Probability that a chunk succeeds, and that it fails, where the outcome is constant."""


@frozen(kw_only=True)
class SabotagedConfig:
    what: Literal["actions", "outcome"]
    """Each row continues as another's actions would have it; or every chunk ends alike, whatever is seen."""
    preset: str = "tiny"
    """Preset of edm."""
    keys: Mapping[str, Any] = field(factory=dict)
    """Further settings of edm."""


class Sabotaged(WorldModel):
    def __init__(self, model: WorldModel, what: str) -> None:
        self.model, self.what, self.history, self.module = model, what, model.history, model.module

    def fit(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        return self.model.fit(windows, noise)

    def imagine(self, windows: Windows, actions: Any, noise: Noise) -> Observation:
        return self.model.imagine(windows, self._asked(actions), noise)

    def outcome(self, windows: Windows, actions: Any, after: Observation) -> Any:
        if self.what == "actions":
            return self.model.outcome(windows, self._asked(actions), after)
        count, width = actions.shape[:2]
        chances = np.full((count, 1 + 2 * width), ENDS / width, np.float32)
        chances[:, 0] = 1 - 2 * ENDS
        return chances

    def measure(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        return self.model.measure(windows, noise)

    def training_state(self) -> Mapping[str, Any]:
        return self.model.training_state()

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        self.model.load_training_state(state)

    def _asked(self, actions: Any) -> Any:
        return np.roll(actions, 1, axis=0) if self.what == "actions" else actions


def _build(config: SabotagedConfig, context: WorldModelContext) -> Sabotaged:
    plugin = load("world_model", "edm")
    keys = {**plugin.presets[config.preset], **config.keys}
    return Sabotaged(build("world_model", "edm", plugin.config(**keys), context), config.what)


vla_rl_plugins = {
    "world_model": {
        "sabotaged": WorldModelPlugin(config=SabotagedConfig, build=_build, summary="edm, of no use on purpose")
    }
}
