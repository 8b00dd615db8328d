"""Base of the OpenVLA policies: inputs from observations, with images bit-identical to what OpenVLA's image processor
makes with Pillow, actions from tokens, saving."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from vla_rl.core.capabilities import ActionTokens, Capturable, Compilable, HasCritic
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.plugins.models.openvla.checkpoint import save_checkpoint
from vla_rl.plugins.models.openvla.codec import ActionCodec, ActionScaler
from vla_rl.plugins.models.openvla.heads import OFTModule, OpenVLAValueHead, PolicyModule, public_network
from vla_rl.plugins.models.openvla.lora import AdapterBase
from vla_rl.plugins.models.openvla.modeling import REGIONS
from vla_rl.plugins.models.openvla.prompts import DecodingPrompts
from vla_rl.plugins.models.openvla.vit import VisionBlock
from vla_rl.toolkit.models.images import resize_batch
from vla_rl.toolkit.models.meta_device import device_autocast, is_autocast_on
from vla_rl.toolkit.models.networks import as_tensor, pack_bfloat16, unpack_bfloat16
from vla_rl.toolkit.models.tokens import categorical_entropy, choose_bins, take_bins

CROP_SIDE = math.sqrt(0.9)


class OpenVLAImageProcessor:
    """Converts images uint8 [B, H, W, 3] of each camera to [B, 6 * cameras, S, S]."""

    def __init__(self, config: OpenVLAConfig, device: torch.device, dtype: torch.dtype, center_crop: bool) -> None:
        self._size = config.image_sizes[0]
        self._strategy = config.image_resize_strategy
        self._device = device
        self._dtype = dtype
        self._center_crop = center_crop
        specs = config.find_backbones()
        self._mean = torch.tensor([s.mean for s in specs], device=device).view(-1, 3, 1, 1)
        self._std = torch.tensor([s.std for s in specs], device=device).view(-1, 3, 1, 1)
        self._fill = torch.tensor([int(m * 255) for m in specs[-1].mean], device=device).view(3, 1, 1)

    def __call__(self, cameras: Sequence[ArrayOrTensor]) -> Tensor:
        size = self._size
        normalised = torch.empty(len(cameras[0]), len(cameras), len(self._mean), 3, size, size, device=self._device)
        for i, images in enumerate(cameras):
            # In place: images are the largest tensors of a small policy, and each further copy of them costs time.
            torch.sub(self._scale_images(images).unsqueeze(1), self._mean, out=normalised[:, i]).div_(self._std)
        return normalised.flatten(1, 3).to(self._dtype)

    def _scale_images(self, images: ArrayOrTensor) -> Tensor:
        """Return images uint8 [B, H, W, 3] as [B, 3, S, S] of 0..1."""
        pixels = as_tensor(images, self._device).permute(0, 3, 1, 2)
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        if self._center_crop:
            pixels = center_crop(pixels, self._size)
        if self._strategy == "letterbox":
            pixels = pad_to_square(pixels, self._fill)
        return resize_pixels(pixels, self._size, keep_aspect=self._strategy != "resize-naive") / 255


def resize_pixels(pixels: Tensor, size: int, keep_aspect: bool) -> Tensor:
    """Resize [B, 3, H, W] of 0..255 to `size`: both sides, or (`keep_aspect`) the shorter one, with a centre crop of
    the longer one."""
    height, width = pixels.shape[2:]
    if not keep_aspect:
        return resize_batch(pixels, size, size, "bicubic")
    if height <= width:
        pixels = resize_batch(pixels, size, int(size * width / height), "bicubic")
    else:
        pixels = resize_batch(pixels, int(size * height / width), size, "bicubic")
    top, left = (round((side - size) / 2) for side in pixels.shape[2:])
    return pixels[:, :, top : top + size, left : left + size]


def pad_to_square(pixels: Tensor, fill: Tensor) -> Tensor:
    """Pad the shorter side to a square with a colour."""
    height, width = pixels.shape[2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    square = fill.to(pixels).expand(len(pixels), 3, side, side).clone()
    square[:, :, top : top + height, left : left + width] = pixels
    return square


def center_crop(pixels: Tensor, size: int) -> Tensor:
    """Crop the central 0.9 of the area of [B, 3, H, W] (0..255), scaled bilinearly to a square."""
    axis = torch.linspace(-CROP_SIDE, CROP_SIDE, size, device=pixels.device)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    grid = torch.stack([x, y], dim=2).expand(len(pixels), -1, -1, -1)
    cropped = F.grid_sample(pixels / 255, grid, mode="bilinear", align_corners=True)
    return (cropped.clamp(0, 1) * 255.5).floor()


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
    trained_heads = ("proprio_projector", "action_head", "deviation")
    blocks = (LlamaDecoderLayer, VisionBlock)
    regions: tuple[Callable[..., Any], ...] = (*REGIONS, OFTModule.read_positions, OpenVLAValueHead.forward)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.module = parts.module
        self.config = parts.config
        self.codec = parts.codec
        self.prompts = parts.prompts
        self.images = parts.images
        self.tokens_per_action = self.codec.action_dim
        self._cameras = parts.cameras
        self.cameras_read = parts.cameras
        self.statistics_name = parts.statistics_name
        self._chunk = parts.chunk
        self._temperature = parts.temperature
        self._device = parts.device
        self._dropouts = [part for part in self.module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        self.module.train()  # gradient checkpointing needs training mode; `_set_dropout` switches dropout

    def save(self, folder: Path) -> None:
        save_checkpoint(self.module, self.config, self.prompts.tokenizer, Path(folder), base=self._parts.base)

    def _set_dropout(self, on: bool) -> None:
        for part in self._dropouts:
            part.train(on)

    def _autocast_context(self) -> AbstractContextManager[None]:
        kind = self._device.type  # train.precision: bf16 enables autocast around it
        return device_autocast(kind, enabled=self._parts.autocast or is_autocast_on(kind))

    def _prepare_images(
        self, obs: Observation, replay: Mapping[str, ArrayOrTensor] | None = None
    ) -> dict[str, Tensor | None]:
        """Return pixels for the module, or vision features where those computed while acting are reused (`replay`:
        recorded extras)."""
        if replay is not None and FEATURES in replay:
            return {"pixels": None, "features": unpack_bfloat16(as_tensor(replay[FEATURES], self._device))}
        pixels = self.images([obs.images[name] for name in self._cameras])
        if not self._parts.reuse:
            return {"pixels": pixels, "features": None}
        with torch.no_grad(), self._autocast_context():
            return {"pixels": None, "features": public_network(self.module.vla).vision_backbone(pixels)}

    def _normalise_state(self, obs: Observation) -> Tensor | None:
        if self._parts.state_scaler is None:
            return None
        if obs.state is None:
            raise ValueError(f"{self.name} was built with `use_proprio`, but the observation has no state")
        values = as_tensor(obs.state, self._device)
        return self._parts.state_scaler.normalise_values(values, clip=True).to(self._parts.dtype)

    def _read_steps(self, obs: Observation) -> Tensor | None:
        """Return the episodes' step counts, int64 [B], if the observation has them."""
        return None if obs.steps is None else as_tensor(obs.steps, self._device)


class ParallelPolicy(FamilyPolicy):
    """OpenVLA-OFT's policy: one pass of the network gives all actions of a chunk."""

    module: OFTModule
    name = "openvla_oft"

    def _run_network(
        self, obs: Observation, reads: int, seen: dict[str, Tensor | None] | None = None, dropout: bool = False
    ) -> Any:
        """Return what `OFTModule.forward` does for so many positions, and values. `seen`: of `_prepare_images`."""
        self._set_dropout(dropout)
        return self._run_module(self._prepare_inputs(obs, self._prepare_images(obs) if seen is None else seen), reads)

    def _prepare_inputs(self, obs: Observation, seen: dict[str, Tensor | None]) -> dict[str, Tensor]:
        prompt = self.prompts.take_prompts(obs.instructions)
        return drop_missing(
            **seen,
            state=self._normalise_state(obs),
            ids=prompt.ids,
            mask=prompt.mask,
            placeholder=prompt.placeholder,
            start=prompt.start,
            steps=self._read_steps(obs),
        )

    def _run_module(self, inputs: Mapping[str, Tensor], reads: int) -> Any:
        with self._autocast_context():
            return self.module(
                inputs.get("pixels"),
                inputs.get("state"),
                inputs["ids"],
                inputs.get("mask"),
                inputs["placeholder"],
                inputs["start"],
                reads,
                inputs.get("features"),
                inputs.get("steps"),
            )


class TokenPolicy(FamilyPolicy, HasCritic, ActionTokens, Capturable):
    """A policy whose actions are the last tokens of the vocabulary."""

    first_token: int
    """Id of the token of the first logit."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.critic = self.module.value_head
        self.first_token = self.codec.first

    @abstractmethod
    def _prepare_inputs(self, obs: Observation, seen: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Return the inputs of `decide` but random numbers."""

    @abstractmethod
    def _compute_logits(
        self, obs: Observation, tokens: Tensor, seen: dict[str, Tensor | None] | None = None, dropout: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return float32 logits [B, C, M, V] and values, for token ids [B, C, M]."""

    def encode_actions(self, actions: ArrayOrTensor) -> Tensor:
        return self.codec.encode_actions(as_tensor(actions, self._device))

    def decode_actions(self, tokens: ArrayOrTensor) -> Tensor:
        return self.codec.decode_tokens(as_tensor(tokens, self._device))

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        self._set_dropout(False)
        inputs = self._prepare_inputs(obs, self._prepare_images(obs))
        if not greedy:
            inputs["uniforms"] = as_tensor(noise.uniforms(self._chunk, self.tokens_per_action), self._device)
        decided = self.decide(inputs)
        return Chunk(
            actions=decided["actions"],
            log_probs=decided["log_probs"],
            values=decided.get("values"),
            extras=build_extras({"features": decided.get("features")}, tokens=decided["tokens"]),
        )

    def _pick_bins(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return token ids [...] and their log-probs, for logits [..., V]: the likeliest, or by uniform numbers."""
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        index = choose_bins(log_probs, uniforms)
        return index + self.first_token, take_bins(log_probs, index)

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        tokens = as_tensor(chunk.extras["tokens"], self._device)
        logits, values = self._compute_logits(obs, tokens, self._prepare_images(obs, chunk.extras))
        log_probs, entropies = self._score_tokens(logits, tokens)
        return Scores(log_probs=log_probs, entropy=entropies, values=values)

    def _score_tokens(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [B, C, M] of token ids [B, C, M], for logits [B, C, M, V]."""
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        return take_bins(log_probs, tokens - self.first_token), categorical_entropy(log_probs)

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the cross-entropy of the expert's tokens (temperature 1), averaged over batch and chunk."""
        return self._cross_entropy(obs, actions, "mean")

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        terms: Tensor = self._cross_entropy(obs, actions, "none")
        return terms.view(-1, self._chunk, self.tokens_per_action).mean(2)

    def _cross_entropy(self, obs: Observation, actions: ArrayOrTensor, reduction: str) -> Tensor:
        tokens = self.encode_actions(actions)
        logits, _ = self._compute_logits(obs, tokens, dropout=True)
        return F.cross_entropy(logits.flatten(0, 2), (tokens - self.first_token).flatten(), reduction=reduction)

    regions = (*FamilyPolicy.regions, _score_tokens)


def drop_missing(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors that are not None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def build_extras(seen: Mapping[str, Tensor | None], **chosen: Tensor) -> dict[str, Tensor]:
    """Return the extras of a chunk that scoring needs again."""
    features = seen["features"]
    return chosen if features is None else {**chosen, FEATURES: pack_bfloat16(features)}
