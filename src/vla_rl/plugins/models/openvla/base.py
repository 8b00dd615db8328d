"""Base of the OpenVLA policies: inputs from observations, actions from tokens, saving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from vla_rl.core.capabilities import ActionTokens, Capturable, Compilable, HasCritic, HasReference
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.plugins.models.openvla.checkpoint import save_checkpoint
from vla_rl.plugins.models.openvla.codec import ActionCodec, ActionScaler
from vla_rl.plugins.models.openvla.heads import OFTModule, OpenVLAValueHead, PolicyModule, public_network
from vla_rl.plugins.models.openvla.images import OpenVLAImageProcessor
from vla_rl.plugins.models.openvla.lora import AdapterBase
from vla_rl.plugins.models.openvla.modeling import REGIONS
from vla_rl.plugins.models.openvla.prompts import DecodingPrompts
from vla_rl.plugins.models.openvla.vit import VisionBlock
from vla_rl.toolkit.models.adapters import before_training
from vla_rl.toolkit.models.meta_device import device_autocast, is_autocast_on
from vla_rl.toolkit.models.networks import as_tensor, pack_bfloat16, unpack_bfloat16


@frozen(kw_only=True)
class Parts:
    """Components from which `builder` constructs a policy."""

    module: PolicyModule
    config: OpenVLAConfig
    codec: ActionCodec
    prompts: DecodingPrompts
    images: OpenVLAImageProcessor
    state_scaler: ActionScaler | None
    cameras: tuple[str, ...]
    chunk: int
    bounds: tuple[tuple[float, ...], tuple[float, ...]]
    """Lower and upper bounds of the simulator's actions."""
    temperature: float
    device: torch.device
    dtype: torch.dtype
    autocast: bool
    reuse: bool
    """Keep vision features computed while acting, and reuse them in training."""
    base: AdapterBase | None
    """Base of the adapters, if `save` writes adapters alone."""
    statistics_name: str | None
    """The spec's `unnorm_key`."""


FEATURES = "vision_features"


class FamilyPolicy(VLAModel, Compilable):
    """Base class that handles inputs and outputs; subclasses choose and score tokens."""

    name: str
    """Name of the plugin, for messages."""
    module: PolicyModule
    blocks = (LlamaDecoderLayer, VisionBlock)
    regions: tuple[Callable[..., Any], ...] = (*REGIONS, OFTModule.read_positions, OpenVLAValueHead.forward)

    def __init__(self, parts: Parts) -> None:
        self.module = parts.module
        self.config = parts.config
        self.codec = parts.codec
        self.prompts = parts.prompts
        self.images = parts.images
        self.tokens_per_action = self.codec.action_dim
        self._state_scaler = parts.state_scaler
        self._cameras = parts.cameras
        self.cameras_read = parts.cameras
        self.statistics_name = parts.statistics_name
        self._chunk = parts.chunk
        self._temperature = parts.temperature
        self._device = parts.device
        self._dtype = parts.dtype
        self._base = parts.base
        self._dropouts = [part for part in self.module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        self._autocast = parts.autocast
        self._reuse = parts.reuse
        self.module.train()  # gradient checkpointing needs training mode; `_set_dropout` switches dropout

    def save(self, folder: Path) -> None:
        save_checkpoint(self.module, self.config, self.prompts.tokenizer, Path(folder), base=self._base)

    def _set_dropout(self, on: bool) -> None:
        for part in self._dropouts:
            part.train(on)

    def _autocast_context(self) -> AbstractContextManager[None]:
        kind = self._device.type  # train.precision: bf16 enables autocast around it
        return device_autocast(kind, enabled=self._autocast or is_autocast_on(kind))

    def _prepare_images(
        self, obs: Observation, replay: Mapping[str, ArrayOrTensor] | None = None
    ) -> dict[str, Tensor | None]:
        """Return pixels for the module, or vision features where those computed while acting are reused (`replay`:
        recorded extras)."""
        if replay is not None and FEATURES in replay:
            return {"pixels": None, "features": unpack_bfloat16(as_tensor(replay[FEATURES], self._device))}
        pixels = self.images([obs.images[name] for name in self._cameras])
        if not self._reuse:
            return {"pixels": pixels, "features": None}
        with torch.no_grad(), self._autocast_context():
            return {"pixels": None, "features": public_network(self.module.vla).vision_backbone(pixels)}

    def _normalise_state(self, obs: Observation) -> Tensor | None:
        if self._state_scaler is None:
            return None
        if obs.state is None:
            raise ValueError(f"{self.name} was built with `use_proprio`, but the observation has no state")
        return self._state_scaler.normalise_values(as_tensor(obs.state, self._device), clip=True).to(self._dtype)

    def _read_steps(self, obs: Observation) -> Tensor | None:
        """Return the episodes' step counts, int64 [B], if the observation has them."""
        return None if obs.steps is None else as_tensor(obs.steps, self._device)


class TokenPolicy(FamilyPolicy, HasCritic, ActionTokens, Capturable):
    """A policy whose actions are the last tokens of the vocabulary."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.critic = self.module.value_head

    def encode_actions(self, actions: ArrayOrTensor) -> Tensor:
        return self.codec.encode_actions(as_tensor(actions, self._device))

    def decode_actions(self, tokens: ArrayOrTensor) -> Tensor:
        return self.codec.decode_tokens(as_tensor(tokens, self._device))


class AdaptedPolicy(FamilyPolicy, HasReference):
    """A policy with adapters. Without them the weights are those before training, so the reference policy needs no
    second copy."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        other_modules = ["proprio_projector"] + ["action_head", "deviation"] * (self.module.deviation is not None)
        self._first = {name: deepcopy(getattr(self.module, name)) for name in other_modules}

    @torch.no_grad()
    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> Tensor:
        """Return log-probs float32 [B, C, M] of recorded chunks under the weights without adapters."""
        with before_training(self.module, **self._first):
            return self.chunk_log_probs(obs, chunk).log_probs


def drop_missing(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors that are not None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def chunk_of(decided: Mapping[str, Tensor]) -> Chunk:
    """Return the chunk of what `decide` returned: "actions", "log_probs", "tokens", and, if any, "values" and
    the "features" that were reused."""
    return Chunk(
        actions=decided["actions"],
        log_probs=decided["log_probs"],
        values=decided.get("values"),
        extras=build_extras({"features": decided.get("features")}, tokens=decided["tokens"]),
    )


def build_extras(seen: Mapping[str, Tensor | None], **chosen: Tensor) -> dict[str, Tensor]:
    """Return the extras of a chunk that scoring needs again."""
    features = seen["features"]
    return chosen if features is None else {**chosen, FEATURES: pack_bfloat16(features)}
