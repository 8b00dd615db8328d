"""A model that is slow to give weights out and to take them in, for `test_weight_transfer.py`: `spec.plugins` of it."""

from __future__ import annotations

import time
from pathlib import Path

from attrs import field, frozen

from vla_rl.core.contexts import ModelContext
from vla_rl.core.declarations import ModelPlugin
from vla_rl.testing.linear import LinearModel


@frozen(kw_only=True)
class SlowConfig:
    stop: str = field()
    """File whose presence makes `load_weights` never return."""
    weights_s: float = 0.15
    """Seconds that `weights` takes."""
    load_s: float = 0.05
    """Seconds between two parameters that are loaded."""


class SlowModel(LinearModel):
    def __init__(self, config: SlowConfig, context: ModelContext) -> None:
        super().__init__(context.env, context.chunk, seed=context.seed)
        self.slow = config

    def weights(self):
        time.sleep(self.slow.weights_s)
        return super().weights()

    def load_weights(self, pairs):
        for pair in pairs:
            super().load_weights([pair])
            time.sleep(self.slow.load_s)
        while Path(self.slow.stop).exists():
            time.sleep(0.05)


vla_rl_plugins = {
    "model": {"slow": ModelPlugin(config=SlowConfig, build=SlowModel, summary="test double: slow weights")}
}
