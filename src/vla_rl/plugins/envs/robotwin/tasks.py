"""The 50 tasks of RoboTwin 2.0."""

from __future__ import annotations

from vla_rl.core.paths import read_table

STEP_LIMITS: dict[str, int] = read_table(__file__, "step_limits.yaml")
"""Task -> step limit of RoboTwin's evaluation, in actions (`_eval_step_limit.yml`). The order numbers the tasks."""


def task_names(tasks: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the task names in the key `tasks`."""
    return (tasks,) if isinstance(tasks, str) else tasks
