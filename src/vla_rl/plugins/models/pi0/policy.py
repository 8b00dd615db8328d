"""The policy of pi0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from vla_rl.core.types import Observation
from vla_rl.plugins.models.pi0.checkpoint import save_checkpoint
from vla_rl.plugins.models.pi0.network import Pi0Module, Prefix
from vla_rl.plugins.models.pi0.prompts import Prompts
from vla_rl.toolkit.models.flow_policy import FlowPolicy


class Pi0Policy(FlowPolicy):
    """Made by `builder.build_policy`."""

    module: Pi0Module
    name = "pi0"

    def __init__(self, *common: Any, prompts: Prompts) -> None:
        super().__init__(*common)
        self.prompts = prompts

    def _prefix(self, obs: Observation, state: Tensor) -> Prefix:
        ids, mask = self.prompts.rows(obs.instructions)
        pixels = self._pixels(obs)
        with self._frozen_prefix():
            return self.module.see(pixels, ids, mask)

    def save(self, folder: Path) -> None:
        save_checkpoint(self.module, self.checkpoint, self._cameras, Path(folder))
