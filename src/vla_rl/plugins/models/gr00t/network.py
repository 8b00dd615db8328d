"""GR00T's networks: towers for images and prompt, built from transformers' modules, and the action head.

N1.5: SigLIP2, one linear layer, and the first layers of Qwen3. N1.7: Qwen3-VL (`qwen.py`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model, SiglipVisionConfig, SiglipVisionModel
from transformers.initialization import no_init_weights

from vla_rl.plugins.models.gr00t.folder import GrootSizes, QwenSizes
from vla_rl.plugins.models.gr00t.head import ActionHead, CategoryLinear, Pair, Source, find_time_bucket
from vla_rl.plugins.models.gr00t.qwen import FRAMES, QwenTowers
from vla_rl.toolkit.models.decoder import run_layers
from vla_rl.toolkit.models.flow.checkpoint import FlowShape
from vla_rl.toolkit.models.flow.network import BackboneFeatures, FlowModule, initialise_flow, mean_over
from vla_rl.toolkit.models.heads import PrefixValueHead
from vla_rl.toolkit.models.networks import text_sizes, vision_sizes

EAGLE = "backbone.eagle_model.language_model"
TIED = {
    f"{EAGLE}.lm_head.weight": f"{EAGLE}.model.embed_tokens.weight",
    "backbone.model.lm_head.weight": "backbone.model.model.language_model.embed_tokens.weight",
}
"""Names of tied tensors, alias -> name used here; files have one of them or both."""


@frozen(eq=False)
class GrootPrefix:
    """Precomputed inputs of the diffusion transformer that do not change with time."""

    pairs: list[Pair]
    """Keys and values that each even block attends to."""
    masks: list[Tensor | None]
    """bool [B, 1, 1, P] for each even block, False at padding; None: no padding."""
    state: Tensor
    """float32 [B, 1, D]: token of the state."""
    summary: Tensor | None
    """float32 [B, P's width + D]: features for a critic that reads the prefix."""


class EagleTowers(nn.ModuleDict):
    """Towers of N1.5: SigLIP2 and Qwen3."""

    def __init__(self, sizes: GrootSizes) -> None:
        rope: Any = {"rope_type": "default", "rope_theta": 1e6}
        text = Qwen3Config(**text_sizes(sizes, sizes.text_depth), rope_parameters=rope)
        text._attn_implementation = "sdpa"
        eagle = {
            "vision_model": SiglipVisionModel(SiglipVisionConfig(**vision_sizes(sizes))),
            "mlp1": nn.Sequential(nn.Linear(sizes.vision_width, sizes.text_width)),
            "language_model": nn.ModuleDict({"model": Qwen3Model(text)}),
        }
        super().__init__({"eagle_model": nn.ModuleDict(eagle)})
        tower: Any = eagle["vision_model"]
        tower.head.requires_grad_(False)  # in the files, but never used
        tower.use_head = False


class Groot(nn.Module):
    """Network with the parameters that a checkpoint holds."""

    def __init__(self, sizes: GrootSizes, shape: FlowShape) -> None:
        super().__init__()
        self.backbone = QwenTowers(sizes) if isinstance(sizes, QwenSizes) else EagleTowers(sizes)
        self.action_head = ActionHead(sizes, shape)


def empty_network(sizes: GrootSizes, shape: FlowShape) -> Groot:
    """Return the network with uninitialised memory, for `networks.fill_network` or `networks.allocate_network`."""
    with no_init_weights():
        return Groot(sizes, shape)


class GrootModule(FlowModule):
    """Network with all parameters of a policy. Subclasses define how a generation's towers run (`run_towers`) and
    what blocks attend to (`sources`)."""

    def __init__(self, groot: Groot, shape: tuple[int, int], row: int, *heads: Any) -> None:
        super().__init__(shape, *heads)
        self.groot = groot
        self.row = row
        self._dtype = next(groot.backbone.parameters()).dtype

    @property
    def network(self) -> Groot:
        return self.groot

    @property
    def _towers(self) -> Any:
        return self.groot.backbone

    @abstractmethod
    def run_towers(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Run the language model on [B, cameras, 3, S, S] in [-1, 1] and int64 [B, P], padded on the right; return [B,
        P, D]. Attention is causal, so padding changes nothing."""

    def list_sources(self, mixed: Tensor, mask: Tensor, count: int) -> list[Source]:
        """Return what each of `count` even blocks attends to: images and prompt [B, P, D]; mask: bool [B, 1, 1, P]."""
        return [(mixed, mask)] * count

    def run_backbone(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> BackboneFeatures:
        return BackboneFeatures(mask, hidden=self.run_towers(pixels, ids))

    def build_prefix(self, seen: BackboneFeatures, state: Tensor) -> GrootPrefix:
        """Return the prefix: images, prompt and state, passed through the part of the head that precedes denoising."""
        assert seen.hidden is not None
        head, mask, attention_mask = self.groot.action_head, seen.valid, seen.valid[:, None, None]
        mixed = head.refine_tokens(seen.hidden, attention_mask)
        state_tokens = head.state_encoder(state[:, None], self.row)
        summary = None
        if isinstance(self.value_head, PrefixValueHead):
            summary = torch.cat([mean_over(mixed, mask), state_tokens[:, 0]], dim=1)
        sources = self.list_sources(mixed, attention_mask, len(head.model.transformer_blocks[::2]))
        return GrootPrefix(
            head.model.compute_pairs(sources), [source_mask for _, source_mask in sources], state_tokens, summary
        )

    def run_expert(self, prefix: GrootPrefix, state: Tensor, x: Tensor, time: Tensor) -> Any:
        """Return the head's output for noisy actions x at `time`. `state` is unused: the prefix contains it."""
        head, horizon, bucket = self.groot.action_head, self.shape[0], find_time_bucket(time)
        tokens = [prefix.state, head.action_encoder(x, bucket, self.row) + head.position_embedding.weight[:horizon]]
        if head.future_tokens is not None:
            tokens.insert(1, head.future_tokens.weight.expand(len(x), -1, -1))
        return head.model(torch.cat(tokens, dim=1).to(self._dtype), bucket, prefix.pairs, prefix.masks, horizon)

    def project_velocity(self, hidden: Tensor) -> Tensor:
        """Return the velocity in our direction, from actions to noise; the original's is from noise to actions."""
        towards: Tensor = self.groot.action_head.action_decoder(hidden, self.row)
        return -towards


class EagleModule(GrootModule):
    """Network of N1.5."""

    def __init__(self, groot: Groot, shape: tuple[int, int], row: int, image_token: int, *heads: Any) -> None:
        super().__init__(groot, shape, row, *heads)
        self.image_token = image_token

    def embed_images(self, pixels: Tensor) -> Any:
        """Return tokens [N, tokens, D] of images [N, 3, S, S] in [-1, 1]."""
        eagle = self._towers["eagle_model"]
        return eagle["mlp1"](eagle["vision_model"](pixel_values=pixels).last_hidden_state)

    def run_towers(self, pixels: Tensor, ids: Tensor) -> Any:
        language = self._towers["eagle_model"]["language_model"]["model"]
        features = self.embed_images(pixels.flatten(0, 1))
        embeds = language.embed_tokens(ids).masked_scatter((ids == self.image_token)[..., None], features)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return run_layers(language, embeds, None, language.rotary_emb(embeds, positions))  # attention is causal


class QwenModule(GrootModule):
    """Network of N1.7. Image tokens are at the same positions in all prompts: `starts` gives the first one of each
    image. Of the blocks that attend to images and prompt, every second one attends to the prompt, the others to the
    images."""

    _images: Tensor

    def __init__(self, groot: Groot, shape: tuple[int, int], row: int, starts: list[int], *heads: Any) -> None:
        super().__init__(groot, shape, row, *heads)
        count = self._towers.sizes.patches
        at = [place for start in starts for place in range(start, start + count)]
        self._starts = starts
        self.register_buffer("_images", torch.tensor(at), persistent=False)

    def run_towers(self, pixels: Tensor, ids: Tensor) -> Any:
        frames = pixels.flatten(0, 1)[:, :, None].expand(-1, -1, FRAMES, -1, -1)
        return self._towers.read(frames, ids, self._starts, self._images)

    def list_sources(self, mixed: Tensor, mask: Tensor, count: int) -> list[Source]:
        at = text_positions(mixed.shape[1], tuple(self._starts), self._towers.sizes.patches, mixed.device)
        text, images = (mixed[:, at], mask[..., at]), (mixed[:, self._images], None)
        return [images if i % self._towers.sizes.text_every else text for i in range(count)]


@lru_cache
def text_positions(length: int, starts: tuple[int, ...], patches: int, device: torch.device) -> Tensor:
    """Return the indices of the tokens that belong to no image; `starts`: index of the first token of each image."""
    images = {at for start in starts for at in range(start, start + patches)}
    return torch.tensor([at for at in range(length) if at not in images], device=device)


def stays_float32(name: str) -> bool:
    """Return whether a parameter stays in float32: the head's norms, and its layers on state, time and actions."""
    return name.startswith("action_head.") and (".transformer_blocks." not in name or ".norm" in name)


def public_name(name: str) -> str:
    return name.replace("vision_model.", "vision_model.vision_model.")


def open_names(names: Collection[str]) -> Mapping[str, str]:
    """Return tensor name -> name in a checkpoint, for tensors named as by `public_name`; tied tensors appear once."""
    opened = {name: name for name in names if name not in TIED}
    again = {name: TIED[name] for name in names if name in TIED and TIED[name] not in opened}
    return {**opened, **again}


@torch.no_grad()
def initialise_weights(network: Groot, seed: int) -> None:
    """Initialise random weights as a function of the seed alone; the velocity starts near 0."""
    initialise_flow(network, seed, rms=1.0)
    rng = torch.Generator().manual_seed(seed)
    part: Any
    for name, part in network.named_modules():
        if isinstance(part, CategoryLinear):
            gain = 0.02 if name.endswith("action_decoder.layer2") else math.sqrt(2 / sum(part.W.shape[1:]))
            if not part.W.is_meta:
                part.W.copy_(torch.randn(part.W.shape, generator=rng) * gain)
            part.b.zero_()
        elif name.endswith(("to_out.0", "net.2")):  # scales what blocks add: all of them together as much as one
            part.weight.mul_((2 * len(network.action_head.model.transformer_blocks)) ** -0.5)
