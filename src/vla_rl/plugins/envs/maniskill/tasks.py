"""Instructions for ManiSkill's manipulation tasks, most of which come without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text("utf-8"))
INSTRUCTIONS: dict[str, str] = _FACTS["instructions"]
"""Task -> instruction of the policy, unless the task or the spec gives another one."""
PANDA_TASKS = frozenset(_FACTS["panda_tasks"])
"""Tasks of one Panda arm with its gripper."""
PANDA_ACTIONS: dict[str, int] = _FACTS["panda_actions"]
"""Control mode of a Panda arm -> number of action dimensions."""
