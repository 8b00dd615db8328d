"""Policies of pi0 and pi0.5."""

from __future__ import annotations

import json
from pathlib import Path

from attrs import evolve
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vla_rl.core.types import Observation, to_numpy
from vla_rl.plugins.models.pi0.adaptive import AdaptiveLayer, Pi05Module
from vla_rl.plugins.models.pi0.architecture import name_variants
from vla_rl.plugins.models.pi0.layout import public_name
from vla_rl.plugins.models.pi0.network import LastLayer, Pi0Module
from vla_rl.plugins.models.pi0.prompts import PiPrompts, find_state_bins
from vla_rl.plugins.models.pi0.statistics import NEW_LINE_STEP, STATE_KIND, STATE_STEP
from vla_rl.toolkit.models.checkpoints.lerobot import PREPROCESSOR
from vla_rl.toolkit.models.flow.policy import FlowPolicy

WITH_STATE = ("exact", "padded")
"""Kinds of pi0.5's prompt that hold the state."""


class Pi0Policy(FlowPolicy):
    """pi0's policy; `builder.build_policy` creates it."""

    module: Pi0Module
    prompts: PiPrompts
    state_in_prompt: str | None = None
    """Form of the state in the prompt of pi0.5."""
    name = "pi0"
    blocks: tuple[type[nn.Module], ...] = (SiglipEncoderLayer, GemmaDecoderLayer, LastLayer)
    regions = (*FlowPolicy.regions, *Pi0Module.regions)

    def save(self, folder: Path) -> None:
        """Save in lerobot's layout, with adapters merged into the weights."""
        kind, source, folder = self.state_in_prompt, self.checkpoint, Path(folder)
        in_prompt = kind in WITH_STATE
        kept = source.processors.get(PREPROCESSOR)
        if kept is not None and kind is not None and (STATE_STEP.encode() in kept) != in_prompt:
            # lerobot would make another prompt of the folder than the spec asked for
            source = evolve(source, raw={**source.shape.to_lerobot(), **source.raw}, processors={})
        self.save_lerobot(
            folder,
            source,
            self.name,
            name_variants(source.sizes),
            prompt=(STATE_STEP if in_prompt else NEW_LINE_STEP,),
            tokenizer="google/paligemma-3b-pt-224",
            normalise_first=in_prompt,
            public_name=public_name,
            image_resolution=[source.sizes.image_size, source.sizes.image_size],
        )
        if kind is not None:
            (folder / STATE_KIND).write_text(json.dumps({"state_in_prompt": kind}) + "\n", encoding="utf-8")


class Pi05Policy(Pi0Policy):
    """pi0.5's policy; `builder.build_policy` creates it."""

    module: Pi05Module
    name = "pi05"
    blocks = (*Pi0Policy.blocks, AdaptiveLayer)
    regions = (*FlowPolicy.regions, *Pi05Module.regions)

    def _encode_prompts(self, obs: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        if self._state_scaler is None:
            return super()._encode_prompts(obs, state)
        # From the recorded state and not from `state`, for which the host would wait.
        width = state.shape[1] if self.state_in_prompt == "padded" else self._state_scaler.dim
        shown_state = self._state_scaler.normalise_on_host(to_numpy(obs.state), width)
        return self.prompts.state_rows(obs.instructions, find_state_bins(shown_state).tolist())

    def _count_missing_tokens(self, ids: Tensor) -> int:
        return 0 if self._state_scaler is None else self.prompts.limit - ids.shape[1]
