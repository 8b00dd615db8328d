"""Pictures of what a world model imagines: recorded episodes above imagined ones, with the same actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.toolkit.world_models.measures import play
from vla_rl.toolkit.world_models.windows import frames_of


def write_strips(world: WorldModel, windows: Windows, file: Path) -> None:
    """A PNG. A line for each episode of `windows` (from its first frame on, as `measure` takes them), and below it what
    is imagined of it; cameras beside each other, from left to right chunk by chunk. What was not played is black."""
    replay, first = play(world, windows), frames_of(windows, world.history - 1)
    lines = []
    for row in range(len(windows.instructions)):
        for seen in (replay.real, replay.imagined):
            pictures = [np.concatenate([i[row] for i in first.images.values()], axis=1)]
            for played, obs in zip(replay.played, seen, strict=True):
                frame = np.concatenate([np.asarray(i[row]) for i in obs.images.values()], axis=1)
                pictures.append(frame if played[row] else np.zeros_like(frame))
            lines.append(np.concatenate(pictures, axis=1))
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(lines)).save(file)
