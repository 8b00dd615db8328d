"""Policy of GR00T for both generations, with its inputs (a chat turn that holds the images, and frames scaled as in
each generation); built from a spec's config and a worker's context, and what does not fit is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve, field, frozen
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.gr00t import network
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.folder import (
    FACTS,
    N1_5,
    N1_7,
    Generation,
    GrootSizes,
    QwenSizes,
    longest_chunk,
    read_folder,
)
from vla_rl.plugins.models.gr00t.head import HeadBlock, TimedBlock
from vla_rl.plugins.models.gr00t.network import GrootModule, public_name
from vla_rl.plugins.models.gr00t.processor import processor_of
from vla_rl.plugins.models.gr00t.qwen import ImageBlock
from vla_rl.plugins.models.gr00t.robots import Robot, metadata_of
from vla_rl.toolkit.models.checkpoints.files import read_sizes
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError, check_horizon
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics
from vla_rl.toolkit.models.flow.build import TINY, VOCAB, FlowBuilder, TrainedParts
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, FlowShape, open_folder, save_folder
from vla_rl.toolkit.models.flow.fit import FlowIOAdapter
from vla_rl.toolkit.models.flow.network import Heads
from vla_rl.toolkit.models.flow.policy import FlowPolicy
from vla_rl.toolkit.models.images import CroppedImages, ImageProcessor
from vla_rl.toolkit.models.prompts import PaddedPrompts, train_tokenizer


@frozen(kw_only=True)
class GrootCheckpoint(FlowCheckpoint):
    """Checkpoint of GR00T. `raw` stays empty: config.json is not lerobot's."""

    generation: Generation
    robot: Robot
    config: Mapping[str, Any]
    """Contents of config.json."""

    @property
    def image_names(self) -> tuple[str, ...]:
        return self.robot.cameras


class GrootPolicy(FlowPolicy):
    """GR00T's policy; `builder.build_policy` creates it."""

    module: GrootModule
    checkpoint: GrootCheckpoint
    name = "gr00t"
    blocks = (SiglipEncoderLayer, Qwen3DecoderLayer, ImageBlock, Qwen3VLTextDecoderLayer, HeadBlock, TimedBlock)
    regions = tuple(region for region in FlowPolicy.regions if region is not FlowPolicy._process_inputs)
    """All but the images, whose tables of weights are computed on the host (N1.7)."""
    exact_time = True

    def save(self, folder: Path) -> None:
        """Save in NVIDIA's layout, with adapters merged into the weights."""
        source = self.checkpoint
        save_folder(
            self.module,
            source,
            Path(folder),
            raw=source.config,
            processors=lambda _: self._robot_files(),
            public_name=public_name,
            public_sizes=source.sizes == source.generation.sizes(),
            prefix="",
        )

    def _robot_files(self) -> dict[str, bytes]:
        source = self.checkpoint
        robot, scales, pixels = source.robot, source.statistics, source.sizes.image_size
        if source.generation == N1_5:
            return metadata_of(robot.tag, scales, self._cameras, pixels)
        return processor_of(robot, scales, self._cameras, pixels, source.shape)


@frozen(kw_only=True)
class Chat:
    """Chat template of a generation."""

    image: str
    """Placeholder token of a part of an image."""
    image_template: str
    """Template of an image: `number` counts from 1, `parts` are its tokens."""
    closing: str
    system: str | None
    special: tuple[str, ...] = field(converter=tuple)
    model: str
    """Model to which the tokenizer belongs, for messages."""

    def write_opening(self, system: str | None, cameras: int, patches: int) -> str:
        """Return the prompt up to the instruction."""
        line = self.system if system is None else system
        images = (self.image_template.format(number=i + 1, parts=self.image * patches) for i in range(cameras))
        before = "" if line is None else f"<|im_start|>system\n{line}<|im_end|>\n"
        return f"{before}<|im_start|>user\n{''.join(images)}"


CHATS = {generation: Chat(**facts["chat"]) for generation, facts in FACTS.items()}


class ChatPrompts(PaddedPrompts):
    """Prompts of one chat turn: images, then the instruction, of which `max_length` tokens are kept."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        generation: str,
        system: str | None,
        cameras: int,
        patches: int,
        formal: bool,
        max_length: int,
        **rest: Any,
    ) -> None:
        chat = CHATS[generation]
        missing = [token for token in chat.special if tokenizer.token_to_id(token) is None]
        if missing:
            raise CheckpointError(
                f"the tokenizer has no {', '.join(missing)}; GR00T {generation}'s is that of {chat.model}"
            )
        self.image_token: Any = tokenizer.token_to_id(chat.image)
        self._chat = chat
        self._formal = formal
        self._words = max_length
        parts = (chat.write_opening(system, cameras, patches), chat.closing)
        before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in parts)
        self._before = before
        self._after = after
        at = [i for i, token in enumerate(self._before) if token == self.image_token]
        self.starts = at[::patches]
        """Index of the first token of each image, the same in every prompt."""
        fixed = len(self._before) + len(self._after)
        super().__init__(tokenizer, max_length=fixed + max_length, **rest)

    def prompt_ids(self, instruction: str) -> list[int]:
        text = re.sub(r"[^\w\s]", "", instruction.lower()) if self._formal else instruction
        words = self.tokenizer.encode(text, add_special_tokens=False).ids[: self._words]
        if self.image_token in words:
            image_token = self._chat.image
            raise CheckpointError(
                f"the instruction {instruction!r} holds {image_token}, which stands for a part of an image"
            )
        return [*self._before, *words, *self._after]


class AreaImages(ImageProcessor):
    """Image preprocessing of N1.7 for square frames: resize, centre crop, resize again, with OpenCV's INTER_AREA."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype, crop: float) -> None:
        super().__init__(size, device, dtype)
        self._crop = crop

    def resize(self, pixels: Tensor, size: int) -> Tensor:
        inner = max(int(size * self._crop), 1)
        start = (size - inner) // 2
        pixels = resize_by_area(pixels, size)
        return resize_by_area(pixels[..., start : start + inner, start : start + inner], size)


def resize_by_area(pixels: Tensor, size: int) -> Tensor:
    """Resize squares [..., S, S] of 0..255 as OpenCV's INTER_AREA does, rounded to whole levels: the mean over the area
    when shrinking, and interpolation between the two nearest pixels when enlarging."""
    side = pixels.shape[-1]
    if side == size:
        return pixels
    weights = _compute_shares(side, size).to(pixels.device)
    return (weights @ pixels @ weights.T + 0.5).floor().clamp(0, 255)


@lru_cache
def _compute_shares(side: int, size: int) -> Tensor:
    """Return the weights [size, side] of a line of `side` pixels in each of `size` pixels; rows sum to 1."""
    step = side / size
    shares = torch.zeros(size, side, dtype=torch.float64)
    for i in range(size):
        if step > 1:
            for j in range(int(i * step), min(int((i + 1) * step) + 1, side)):
                shares[i, j] = max(min((i + 1) * step, j + 1) - max(i * step, j), 0) / step
            continue
        low = int(i * step)
        part = max((i + 1) - (low + 1) / step, 0.0)
        part -= int(part)
        shares[i, low] += 1 - part
        shares[i, min(low + 1, side - 1)] += part
    return shares.float()


logger = logging.getLogger(__name__)


def build_policy(config: GrootConfig, context: ModelContext) -> GrootPolicy:
    """Build the policy. Raise CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    policy: GrootPolicy = GrootBuilder(config, context).build()
    return policy


class GrootBuilder(FlowBuilder):
    """Builds policies of both generations."""

    policy = GrootPolicy
    prompts = ChatPrompts
    presets = {
        "tiny": GrootSizes(**TINY, **FACTS["N1.5"]["tiny"]),
        "tiny_n1_7": QwenSizes(**TINY, **FACTS["N1.7"]["tiny"]),
        "full": GrootSizes(),
        "full_n1_7": QwenSizes(),
    }
    quantiles = True
    by_step = True
    stays_float32 = staticmethod(network.stays_float32)
    public_name = staticmethod(network.public_name)

    def choose_fit(self) -> FlowIOAdapter:
        fit = super().choose_fit()
        assert isinstance(fit.checkpoint, GrootCheckpoint)
        generation, scales = fit.checkpoint.generation, fit.checkpoint.statistics
        _check_relative(generation, scales)
        scales = _with_groot_rules(scales, generation, self.context.scaling is not None)
        return evolve(
            fit,
            checkpoint=evolve(fit.checkpoint, statistics=scales),
            state=None if fit.state is None else scales.state,
        )

    def open_checkpoint(self, folder: Path) -> GrootCheckpoint:
        raw, generation, robot = read_folder(folder, self.config, self.measured)
        shape = FlowShape(**generation.shape_of(raw))
        opened = open_folder(
            folder,
            {},
            sizes=_choose_sizes(folder, generation, robot, shape),
            shape=shape,
            statistics=robot.statistics,
            tokenizer=self.config.tokenizer,
            slots=max(self.slots, len(robot.cameras)),
            open_names=network.open_names,
        )
        logger.warning(
            "the prompt of GR00T %s and its tokenizer could not be compared with the original's; if %s does not act as "
            "published, look at model.system and at how state and action were scaled (docs/models/gr00t.md)",
            generation.name,
            folder,
        )
        check_horizon(folder, longest_chunk(raw, generation, robot), self.context.chunk)
        return _extend(opened, generation, robot, dict(raw.data), processors=robot.files)

    def preset_checkpoint(self, sees_state: bool) -> GrootCheckpoint:
        plain = super().preset_checkpoint(sees_state)
        scales, generation = plain.statistics, self._preset_generation()
        if scales.state is not None and not scales.state.values:  # the identity, expressed as a range
            dim = self.env.state_dim
            ends = ((-1.0,) * dim, (1.0,) * dim)
            scales = evolve(scales, state=FeatureScale(mode="MIN_MAX", values=ends, dim=dim))
        formal = generation == N1_7
        robot = Robot(tag="new_embodiment", row=31, statistics=scales, cameras=(), files={}, formal=formal)
        return _extend(plain, generation, robot, generation.to_config(plain.shape), statistics=scales)

    def _preset_generation(self) -> Generation:
        return N1_7 if isinstance(self.presets[self.config.preset], QwenSizes) else N1_5

    def prompt_text(self, instruction: str) -> str:
        chat = CHATS[self._preset_generation().name]
        system = self.config.system or chat.system or ""
        return f"system\n{system}\nuser\n<image 1><image 2>{instruction}\nassistant\n"

    def train_tokenizer(self) -> Tokenizer:
        """Return a tokenizer with a few words, and the special tokens of a chat with images."""
        special = CHATS[self._preset_generation().name].special
        instructions = (task.instruction for task in self.env.tasks)
        tokenizer = train_tokenizer(instructions, self.prompt_text, VOCAB - len(special))
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return tokenizer

    def make_prompts(self, fit: FlowIOAdapter, **options: Any) -> Any:
        source = fit.checkpoint
        assert isinstance(source, GrootCheckpoint)
        return super().make_prompts(
            fit,
            generation=source.generation.name,
            system=self.config.system,
            cameras=len(fit.cameras),
            patches=source.sizes.patches,
            formal=source.robot.formal,
        )

    def make_images(self, fit: FlowIOAdapter) -> ImageProcessor:
        source = fit.checkpoint
        assert isinstance(source, GrootCheckpoint)
        if source.generation == N1_5:
            return CroppedImages(source.sizes.image_size, self.device, self.dtype)
        for name in fit.cameras:
            high, wide = self.env.cameras[name]
            if high != wide:
                raise MismatchError(
                    f"camera {name!r} gives {wide} x {high} pixels; GR00T N1.7 keeps the aspect of a frame, and only "
                    "square ones are supported: set the simulator to equal width and height"
                )
        return AreaImages(source.sizes.image_size, self.device, self.dtype, source.robot.crop)

    def empty_network(self, checkpoint: FlowCheckpoint) -> network.Groot:
        return network.empty_network(checkpoint.sizes, checkpoint.shape)

    def initialise_network(self, groot: network.Groot, seed: int) -> None:
        network.initialise_weights(groot, seed)

    def find_parts(self, groot: network.Groot) -> TrainedParts:
        return TrainedParts(vlm=groot.backbone, state=groot.action_head.state_encoder.layer1.W)

    def head_widths(self, sizes: GrootSizes) -> tuple[int, int]:
        return sizes.output, sizes.text_width + sizes.width

    def make_module(self, groot: Any, fit: FlowIOAdapter, prompts: ChatPrompts, heads: Heads) -> network.GrootModule:
        source, shape = fit.checkpoint, fit.checkpoint.shape
        assert isinstance(source, GrootCheckpoint)
        place = (groot, (shape.horizon, shape.action_dim), source.robot.row)
        if source.generation == N1_5:
            return network.EagleModule(*place, prompts.image_token, *heads)
        return network.QwenModule(*place, prompts.starts, *heads)


def _extend(
    plain: FlowCheckpoint, generation: Generation, robot: Robot, config: dict[str, Any], **changed: Any
) -> GrootCheckpoint:
    fields = {**asdict(plain, recurse=False), **changed}
    return GrootCheckpoint(**fields, generation=generation, robot=robot, config=config)


def _with_groot_rules(scales: Statistics, generation: Generation, measured: bool) -> Statistics:
    """Return the statistics with GR00T's rules: a feature that never changes is scaled to 0; N1.7 clips actions, and
    also the state if the demonstrations' statistics scale it."""
    action, state = evolve(scales.action, flat=True), scales.state and evolve(scales.state, flat=True)
    if generation == N1_7:
        action = evolve(action, clip=True)
        state = state and evolve(state, clip=state.clip or measured)
    return evolve(scales, action=action, state=state)


def _check_relative(generation: Generation, scales: Statistics) -> None:
    """Raise MismatchError for relative actions that NVIDIA's files have no place for."""
    if generation == N1_5 and scales.references:
        raise MismatchError(
            "model.actions: GR00T N1.5 has no actions relative to the state; take N1.7 (preset tiny_n1_7, or its "
            "checkpoint), pi0, pi05 or smolvla, or leave model.actions out"
        )
    if scales.references and scales.state is None:
        raise MismatchError(
            "model.actions: GR00T's files keep actions relative to the state together with the state, and this policy "
            "sees none; leave model.use_state out, or model.actions"
        )


def _choose_sizes(folder: Path, generation: Generation, robot: Robot, shape: FlowShape) -> GrootSizes:
    """Return the sizes of the network. Raise CheckpointError for images, chunks and robots that it does not take."""
    architecture = folder / ARCHITECTURE
    sizes = read_sizes(architecture, generation.sizes) if architecture.is_file() else generation.sizes()
    if robot.pixels not in (None, sizes.image_size):
        raise CheckpointError(
            f"{folder} scales images to {robot.pixels} pixels, {sizes.image_size} are supported (shortest_image_edge)"
        )
    if shape.horizon > sizes.positions:
        raise CheckpointError(
            f"{folder / 'config.json'}: 'action_horizon' is {shape.horizon}, and the network has {sizes.positions} "
            "positions"
        )
    if robot.row >= sizes.embodiments:
        raise CheckpointError(
            f"{folder}: embodiment {robot.tag!r} has row {robot.row}, and the network {sizes.embodiments} rows"
        )
    return sizes
