"""Opens a folder: finds its generation, its robot and the length of its chunks. Light to import."""

from __future__ import annotations

from pathlib import Path

from vla_rl.core.contexts import CheckContext
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.folder import N1_5, Generation, read_config
from vla_rl.plugins.models.gr00t.processor import read_processor
from vla_rl.plugins.models.gr00t.robots import Robot, read_metadata
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.fitting import check_folder, data_references, known_number
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics
from vla_rl.toolkit.relative_actions import References

UNREAD = Statistics(action=FeatureScale(mode="IDENTITY", values=(), dim=0), state=None)
"""Placeholder for the data's statistics before they are read."""


def read_folder(
    folder: Path, config: GrootConfig, measured: Statistics | None = None
) -> tuple[Record, Generation, Robot]:
    """config.json and the robot that the spec asks for. Raises CheckpointError.

    Args:
        measured: statistics of the data that the run scales by; the folder then needs none of that robot.
    """
    raw, generation = read_config(folder)
    return raw, generation, (read_metadata if generation == N1_5 else read_processor)(folder, config, measured)


def longest_chunk(raw: Record, generation: Generation, robot: Robot) -> int:
    """Actions that can be executed of a denoised chunk."""
    return min(generation.shape_of(raw)["horizon"], robot.actions or 10**6)


def check_checkpoint(config: GrootConfig, context: CheckContext) -> None:
    """Check that the folder is complete, of this model, and has chunks as long as the spec's."""
    measured = None if context.scaling is None else UNREAD
    check_folder(config, context, lambda folder: longest_chunk(*read_folder(folder, config, measured)))


def relative_actions(config: GrootConfig, env: EnvInfo) -> References:
    """Return what actions are relative to, for `ModelPlugin.relative_actions`. Raise CheckpointError or
    MismatchError."""

    def read_references(folder: Path) -> References | None:
        return read_folder(folder, config, UNREAD)[2].statistics.references

    return data_references(config, env, read_references)


def action_dim(config: GrootConfig) -> int | None:
    """Return the number of action dimensions in the checkpoint's statistics, where it is known (`known_number`)."""

    def read_action_dim(folder: Path) -> int:
        return read_folder(folder, config)[2].statistics.action.dim

    return known_number(config.checkpoint, read_action_dim)
