"""The 50 tasks of RoboTwin 2.0."""

from __future__ import annotations

from pathlib import Path

import yaml

STEP_LIMITS: dict[str, int] = yaml.safe_load(Path(__file__).with_name("step_limits.yaml").read_text("utf-8"))
"""Task -> step limit of RoboTwin's evaluation, in actions (`_eval_step_limit.yml`). The order numbers the tasks."""


def task_names(tasks: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the task names in the key `tasks`."""
    return (tasks,) if isinstance(tasks, str) else tasks
