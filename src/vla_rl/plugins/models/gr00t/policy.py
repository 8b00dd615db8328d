"""Policy of GR00T, for both generations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vla_rl.plugins.models.gr00t.folder import N1_5, Generation
from vla_rl.plugins.models.gr00t.head import HeadBlock, TimedBlock
from vla_rl.plugins.models.gr00t.network import GrootModule, public_name
from vla_rl.plugins.models.gr00t.processor import processor_of
from vla_rl.plugins.models.gr00t.qwen import ImageBlock
from vla_rl.plugins.models.gr00t.robots import Robot, metadata_of
from vla_rl.toolkit.models.flow.checkpoint import FlowCheckpoint, save_folder
from vla_rl.toolkit.models.flow.policy import FlowPolicy


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
