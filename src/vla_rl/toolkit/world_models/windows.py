"""Cutting, overwriting and extending `Windows`."""

from __future__ import annotations

import attrs
import numpy as np

from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.core.world_models import Windows

ROWS = ("state", "actions", "executed", "outcomes", "first", "states", "seeds")
"""Arrays with one row per window."""


def put_rows(windows: Windows, rows: Array, others: Windows) -> Windows:
    """Write `others` (R windows of the same shape) into `windows` at these positions, and return the result."""
    for camera, frames in windows.images.items():
        frames[rows] = others.images[camera]
    for name in ROWS:
        getattr(windows, name)[rows] = getattr(others, name)
    texts = list(windows.instructions)
    for row, text in zip(rows, others.instructions, strict=True):
        texts[int(row)] = text
    return attrs.evolve(windows, instructions=tuple(texts))


def take_frames(windows: Windows, first: int, last: int) -> Windows:
    """Return the frames first ... last - 1, and the chunks between them."""
    return attrs.evolve(
        windows,
        images={camera: frames[:, first:last] for camera, frames in windows.images.items()},
        state=windows.state[:, first:last],
        first=windows.first + first,
        **{name: getattr(windows, name)[:, first : last - 1] for name in ("actions", "executed", "outcomes")},
    )


def followed_by(windows: Windows, actions: Array, executed: Array, outcomes: Array, after: Observation) -> Windows:
    """Return windows of the same length, moved on by one chunk: its actions [B, C, A], `executed` [B, C] and outcome
    class [B] led to `after`. A chunk with fewer actions than the window's others is padded at its end."""
    chunk = windows.actions.shape[2]
    short = [(0, 0), (0, chunk - actions.shape[1])]
    padded_actions, padded_executed = np.pad(actions, [*short, (0, 0)]), np.pad(executed, short)
    state = windows.state[:, -1] if after.state is None else to_numpy(after.state)
    return attrs.evolve(
        windows,
        images={
            camera: np.concatenate([frames[:, 1:], to_numpy(after.images[camera])[:, None]], axis=1)
            for camera, frames in windows.images.items()
        },
        state=np.concatenate([windows.state[:, 1:], state[:, None]], axis=1),
        actions=np.concatenate([windows.actions, padded_actions[:, None]], axis=1)[:, 1:],
        executed=np.concatenate([windows.executed, padded_executed[:, None]], axis=1)[:, 1:],
        outcomes=np.concatenate([windows.outcomes, outcomes[:, None]], axis=1)[:, 1:],
        first=windows.first + 1,
    )


def frames_of(windows: Windows, index: int) -> Observation:
    """Return the observation at frame `index` of each window."""
    return Observation(
        images={camera: frames[:, index] for camera, frames in windows.images.items()},
        instructions=windows.instructions,
        state=windows.state[:, index] if windows.state.shape[2] else None,
    )
