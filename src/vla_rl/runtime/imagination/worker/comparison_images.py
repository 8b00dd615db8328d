"""Images that compare recorded episodes with what the world model imagines for the same actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vla_rl.core.types import Array, Observation
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.toolkit.world_models.measures import imagine_episodes
from vla_rl.toolkit.world_models.windows import frames_of

GAP = 2
"""Pixels between two frames, and between two episodes."""
WHITE = 255


def write_comparison_image(model: WorldModel, windows: Windows, file: Path) -> None:
    """Write a PNG with two lines for each episode of `windows`: the recorded one (from its first frame on, as `measure`
    takes them), and below it the imagined one.

    Frames run from left to right chunk by chunk, cameras next to each other. White marks chunks that were not executed.
    """
    imagined = imagine_episodes(model, windows)
    first = frames_of(windows, model.history - 1)
    lines = []
    for episode in range(len(windows.instructions)):
        for observations in (imagined.real, imagined.imagined):
            frames = [_join_cameras(first, episode)]
            for executed, obs in zip(imagined.executed, observations, strict=True):
                frame = _join_cameras(obs, episode)
                frames.append(frame if executed[episode] else np.full_like(frame, WHITE))
            lines.append(np.concatenate(frames, axis=1))
        lines.append(np.full_like(lines[-1][: 3 * GAP], WHITE))
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(lines)).save(file)


def _join_cameras(obs: Observation, episode: int) -> Array:
    """Return the cameras of an env side by side, with a gap to the right and below."""
    frame = np.concatenate([np.asarray(images[episode]) for images in obs.images.values()], axis=1)
    return np.pad(frame, ((0, GAP), (0, 2 * GAP), (0, 0)), constant_values=WHITE)
