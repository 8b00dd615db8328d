"""Settings of `lerobot`."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen
from attrs import validators as v

from vla_rl.toolkit.data.recording import RecordSettings


@frozen(kw_only=True)
class LeRobotHookConfig(RecordSettings):
    """Spec keys of the hook `lerobot`, with those of RecordSettings."""

    folder: Path | None = None
    """Folder of the data set, to which episodes are appended; null: `lerobot` in the run's folder."""
    fps: int | None = field(default=None, validator=v.optional([v.ge(1), v.le(1000)]))
    """Rows (frames) per second in `meta/info.json`, 1 to 1000; null: `env.control_hz`, or 10 where the simulator does
    not say how long an action takes."""
