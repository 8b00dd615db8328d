"""Builds the policy from a spec's config and a worker's context; refuses what does not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from attrs import asdict, evolve
from tokenizers import AddedToken, Tokenizer

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
from vla_rl.plugins.models.gr00t.inputs import CHATS, AreaImages, ChatPrompts
from vla_rl.plugins.models.gr00t.policy import GrootCheckpoint, GrootPolicy
from vla_rl.plugins.models.gr00t.robots import Robot
from vla_rl.toolkit.models.checkpoints.files import read_sizes
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError, check_horizon
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics
from vla_rl.toolkit.models.flow.build import TINY, VOCAB, FlowBuilder, TrainedParts
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, FlowShape, open_folder
from vla_rl.toolkit.models.flow.fit import FlowIOAdapter
from vla_rl.toolkit.models.flow.network import Heads
from vla_rl.toolkit.models.images import CroppedImages, ImageProcessor
from vla_rl.toolkit.models.prompts import train_tokenizer

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
