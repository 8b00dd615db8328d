"""Images that compare recorded episodes with what the world model imagines for the same actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vla_rl.core.types import Array, Observation
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.toolkit.world_models.measures import play
from vla_rl.toolkit.world_models.windows import frames_of

GAP, WHITE = 2, 255


def write_strips(world: WorldModel, windows: Windows, file: Path) -> None:
    """Write a PNG with two lines for each episode of `windows`: the recorded one (from its first frame on, as `measure`
    takes them), and below it the imagined one.

    Frames run from left to right chunk by chunk, cameras next to each other. White marks chunks that were not executed.
    """
    replay, first = play(world, windows), frames_of(windows, world.history - 1)
    lines = []
    for row in range(len(windows.instructions)):
        for seen in (replay.real, replay.imagined):
            pictures = [_framed(first, row)]
            for played, obs in zip(replay.played, seen, strict=True):
                frame = _framed(obs, row)
                pictures.append(frame if played[row] else np.full_like(frame, WHITE))
            lines.append(np.concatenate(pictures, axis=1))
        lines.append(np.full_like(lines[-1][: 3 * GAP], WHITE))
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(lines)).save(file)


def _framed(obs: Observation, row: int) -> Array:
    """Return the cameras of an env side by side, with a gap to the right and below."""
    frame = np.concatenate([np.asarray(images[row]) for images in obs.images.values()], axis=1)
    return np.pad(frame, ((0, GAP), (0, 2 * GAP), (0, 0)), constant_values=WHITE)
