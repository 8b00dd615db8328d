"""Hook `lerobot`: writes episodes of rollouts and evaluations to a data set in LeRobot's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.data.recording import RecordSettings


@frozen(kw_only=True)
class LeRobotHookConfig(RecordSettings):
    """Spec keys of the hook `lerobot`, with those of RecordSettings."""

    folder: Path | None = None
    """Folder of the data set, to which episodes are appended; null: `lerobot` in the run's folder."""
    fps: int = field(default=10, validator=[v.ge(1), v.le(1000)])
    """Rows (frames) per second in `meta/info.json`, 1 to 1000; a key because simulators do not say how long an action
    takes."""


def _build(config: LeRobotHookConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.lerobot.recorder import LeRobotRecorder

    return LeRobotRecorder(config)


def _check(config: LeRobotHookConfig, context: Context) -> None:
    from vla_rl.toolkit.data.lerobot import check_folder

    if config.folder is not None:
        with at("folder"):
            check_folder(config.folder)


plugin = Plugin(
    config=LeRobotHookConfig,
    build=_build,
    summary="episodes as a data set in LeRobot's format 3.0",
    extra="data",
    check=_check,
    files=lambda config: ("lerobot",) if config.folder is None else (),
)
