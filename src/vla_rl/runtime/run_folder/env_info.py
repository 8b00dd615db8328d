"""The env that a checkpoint's policy was trained in, so that it acts without the simulator: `env.json` beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from vla_rl.core.errors import CheckpointError
from vla_rl.core.types import EnvInfo, TaskInfo

NAME = "env.json"
TUPLES = ("action_low", "action_high", "notes", "action_names", "state_names")
"""Fields of EnvInfo that JSON holds as lists."""


def write_env_info(checkpoint: Path, info: EnvInfo) -> None:
    """Write the description of an env into a checkpoint folder."""
    text = json.dumps(attrs.asdict(info), indent=1, default=lambda number: number.item())
    (checkpoint / NAME).write_text(text + "\n", encoding="utf-8")


def _read_task(data: dict[str, Any]) -> TaskInfo:
    return TaskInfo(**{**data, "categories": tuple(data.get("categories", ()))})


def read_env_info(checkpoint: Path) -> EnvInfo:
    """Return what was written, with defaults of fields that an earlier version lacked. Raises CheckpointError."""
    file = checkpoint / NAME
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        cameras = {name: (height, width) for name, (height, width) in data.pop("cameras").items()}
        tasks = tuple(_read_task(task) for task in data.pop("tasks"))
        data |= {name: tuple(data[name]) for name in TUPLES if name in data}
        return EnvInfo(cameras=cameras, tasks=tasks, **data)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing, which says what the policy sees and does; every checkpoint of a run has one: "
            f"continue the run (--resume) for a step to write another checkpoint"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise CheckpointError(f"{file} does not describe a simulator: {exc}") from exc
