"""Meta-World's tasks, their instructions and its benchmarks; known without importing the simulator."""

from __future__ import annotations

import json
from pathlib import Path

from vla_rl.core.paths import read_table

FACTS_FILE = "lerobot.json"
"""File that tools/metaworld_facts.py writes: what checkpoints and data sets in public were made with."""
_FACTS = json.loads(Path(__file__).with_name(FACTS_FILE).read_text(encoding="utf-8"))
INSTRUCTIONS: dict[str, str] = _FACTS["instructions"]
"""Task -> lerobot's sentence, in the official order, which numbers the reset states. Two tasks share one."""
CORNER2_POSITION: tuple[float, float, float] = tuple(_FACTS["corner2_position"])
"""Place of lerobot's camera corner2 in the model [m]."""

BENCHMARKS: dict[str, tuple[str, ...]] = {
    name: tuple(tasks) for name, tasks in read_table(__file__, "benchmarks.yaml").items()
} | {"MT50": tuple(INSTRUCTIONS)}
"""Benchmark -> its tasks. MT1 is any single task."""
