"""Policies of pi0 and pi0.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vla_rl.core.types import Observation, to_numpy
from vla_rl.plugins.models.pi0.adaptive import AdaptiveLayer, Pi05Module
from vla_rl.plugins.models.pi0.checkpoint import SLOTS, save_checkpoint
from vla_rl.plugins.models.pi0.network import LastLayer, Pi0Module, PiPrefix
from vla_rl.plugins.models.pi0.prompts import PiPrompts, bins_of
from vla_rl.toolkit.models.flow_network import BackboneFeatures
from vla_rl.toolkit.models.flow_policy import FlowPolicy


class Pi0Policy(FlowPolicy):
    """pi0's policy; `builder.build_policy` creates it."""

    module: Pi0Module
    name = "pi0"
    blocks = (SiglipEncoderLayer, GemmaDecoderLayer, LastLayer)
    regions = (*FlowPolicy.regions, *Pi0Module.regions)

    def __init__(self, *common: Any, prompts: PiPrompts) -> None:
        super().__init__(*common)
        self.prompts = prompts

    def _encode_prompts(self, obs: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.prompts.token_rows(obs.instructions)

    def _run_backbone(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> BackboneFeatures:
        return self.module.run_backbone(pixels, ids, mask)

    def _build_prefix(self, seen: BackboneFeatures, state: Tensor) -> PiPrefix:
        return self.module.build_prefix(seen)

    def save(self, folder: Path) -> None:
        save_checkpoint(self.module, self.checkpoint, self._cameras, Path(folder), chunk=self._chunk)


class Pi05Policy(FlowPolicy):
    """pi0.5's policy; `builder.build_policy` creates it."""

    module: Pi05Module
    name = "pi05"
    blocks = (SiglipEncoderLayer, GemmaDecoderLayer, LastLayer, AdaptiveLayer)
    regions = (*FlowPolicy.regions, *Pi05Module.regions)

    def __init__(self, *common: Any, prompts: PiPrompts, kind: str) -> None:
        super().__init__(*common)
        self.prompts = prompts
        self.state_in_prompt = kind

    def _encode_prompts(self, obs: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        if self._state_scaler is None:
            return self.prompts.token_rows(obs.instructions)
        # From the recorded state and not from `state`, for which the host would wait.
        width = state.shape[1] if self.state_in_prompt == "padded" else self._state_scaler.dim
        shown_state = self._state_scaler.normalise_on_host(to_numpy(obs.state), width)
        return self.prompts.state_rows(obs.instructions, bins_of(shown_state).tolist())

    def _run_backbone(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> BackboneFeatures:
        shown = None
        if self.module.pads:
            pixels, shown = _padded_to_cameras(pixels)
        return self.module.run_backbone(pixels, ids, mask, shown)

    def _build_prefix(self, seen: BackboneFeatures, state: Tensor) -> PiPrefix:
        return self.module.build_prefix(seen)

    def _count_missing_tokens(self, ids: Tensor) -> int:
        return 0 if self._state_scaler is None else self.prompts.limit - ids.shape[1]

    def save(self, folder: Path) -> None:
        save_checkpoint(
            self.module,
            self.checkpoint,
            self._cameras,
            Path(folder),
            chunk=self._chunk,
            kind=self.state_in_prompt,
        )


def _padded_to_cameras(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images with black, masked ones appended up to the number of the model's cameras, and bool [B, cameras],
    False for masked ones. Padding tokens attend to masked images as well."""
    rows, count = pixels.shape[:2]
    is_camera = torch.arange(max(SLOTS, count), device=pixels.device).expand(rows, -1) < count
    black = pixels.new_full((rows, is_camera.shape[1] - count, *pixels.shape[2:]), -1.0)
    return torch.cat([pixels, black], dim=1), is_camera
