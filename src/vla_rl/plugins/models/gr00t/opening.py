"""A folder opened: which generation, which robot, and how long its chunks are. Light to import."""

from __future__ import annotations

from pathlib import Path

from vla_rl.core.types import Context
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.folder import N1_5, WANTED, Generation, read_config
from vla_rl.plugins.models.gr00t.processor import read_processor
from vla_rl.plugins.models.gr00t.robots import Robot, read_metadata
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.fitting import check_folder, known_action_dim
from vla_rl.toolkit.models.lerobot import FeatureScale, Statistics

UNREAD = Statistics(action=FeatureScale(mode="IDENTITY", values=(), dim=0), state=None)
"""In place of the data's, before they are read."""


def read_folder(
    folder: Path, config: GrootConfig, measured: Statistics | None = None
) -> tuple[Record, Generation, Robot]:
    """config.json and the robot that the spec asks for. Raises CheckpointError.

    Args:
        measured: of the data that the run scales by; the folder then needs no statistics of that robot.
    """
    raw, generation = read_config(folder)
    return raw, generation, (read_metadata if generation == N1_5 else read_processor)(folder, config, measured)


def longest_chunk(raw: Record, generation: Generation, robot: Robot) -> int:
    """Actions that can be executed of a denoised chunk."""
    return min(generation.shape_of(raw)["horizon"], robot.actions or 10**6)


def check(config: GrootConfig, context: Context) -> None:
    """For `Plugin.check`: the folder is complete and of this model, and holds chunks as long as the spec's."""
    measured = None if context.scaling is None else UNREAD
    check_folder(config, context, lambda folder: longest_chunk(*read_folder(folder, config, measured)))


def action_dim(config: GrootConfig) -> int | None:
    """Numbers of an action as the checkpoint's statistics have it, where that is known (`known_action_dim`)."""

    def read(folder: Path) -> int:
        return read_folder(folder, config)[2].statistics.action.dim

    return known_action_dim(config.checkpoint, read, WANTED)
