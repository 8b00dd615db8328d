"""Recordings of an arm that follows smooth curves, made here: what inspections compare faults with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.core.types import Array
from vla_rl.toolkit.data.inspection.recorded import InspectedEpisode, RecordedData

JOINTS, COUNT, FPS = 6, 10, 10
NAMES = (*(f"joint_{index}.pos" for index in range(JOINTS)), "gripper.pos")
CAMERAS = ("top", "wrist")
Recording = dict[str, Any]


def make_recording(seed: int, steps: int = 80, side: int = 24, kind: str = "target") -> Recording:
    """An episode: "actions" [T, 7], "state" [T + 1, 7], "images" of two cameras [T + 1, side, side, 3], "instruction".

    Args:
        kind: an action is the state two frames later ("target"), or how far it moves ("velocity").
    """
    numbers = np.random.default_rng(seed)
    time = np.arange(steps + 1)
    phase = numbers.uniform(0, 1, JOINTS)
    curves = [
        (0.3 + 0.1 * i) * np.sin(2 * np.pi * (time / (50 + 7 * i) + phase[i]))
        + 0.2 * i
        + 0.004 * np.cumsum(numbers.normal(size=steps + 1))
        for i in range(JOINTS)
    ]
    grip = (time > steps // 2 + numbers.integers(-8, 8)).astype(float)
    state = np.stack([*curves, grip], axis=1)
    if kind == "target":
        actions = np.concatenate([state[2:], state[-1:]])[:steps]
    else:
        actions = np.diff(state, axis=0) / 0.05
        actions[:, -1] = 2 * grip[1:] - 1
    actions[:, :JOINTS] += 0.005 * numbers.normal(size=(steps, JOINTS))
    return {
        "actions": actions.astype(np.float32),
        "state": state.astype(np.float32),
        "images": {name: draw_images(state, side, 90 * place, numbers) for place, name in enumerate(CAMERAS)},
        "instruction": "pick the green cube",
    }


def draw_images(state: Array, side: int, shade: int, numbers: Any) -> Array:
    """Images of a scene without symmetry, in which a square moves with the state, uint8 [T, side, side, 3]."""
    rows, columns = np.mgrid[0:side, 0:side] * 64 / side
    scene = np.stack([shade + 1.2 * rows, 60 + 0.8 * columns + shade / 2, np.full_like(rows, 120 - shade)], axis=2)
    scene[side // 2 :, : side // 4] = (200, 40 + shade, 40)
    images = []
    for row in state:
        image = scene.copy()
        x, y = (int(side * (0.35 + 0.4 * value)) % side for value in row[:2])
        image[max(0, y - side // 10) : y + side // 10, max(0, x - side // 10) : x + side // 10] = (20, 220, 60)
        images.append(np.clip(image + 2 * numbers.normal(size=image.shape), 0, 255).astype(np.uint8))
    return np.stack(images)


def make_recordings(kind: str = "target", side: int = 24) -> list[Recording]:
    return [make_recording(seed, 70 + 5 * (seed % 5), side, kind) for seed in range(COUNT)]


def open_made(recordings: list[Recording], names: bool = True, **changes: Any) -> RecordedData:
    """Open recordings that were made here, without a folder."""
    episodes = [
        InspectedEpisode(
            number=number,
            task=one["instruction"],
            times=np.arange(len(one["actions"])) / FPS,
            vectors={"action": one["actions"], "observation.state": one["state"][: len(one["actions"])]},
        )
        for number, one in enumerate(recordings)
    ]
    read: Callable[[InspectedEpisode, str, int], Array] = lambda episode, camera, frame: (  # noqa: E731
        recordings[episode.number]["images"][camera][frame]
    )
    made = {
        "folder": Path("made"),
        "layout": "made",
        "fps": float(FPS),
        "episodes": episodes,
        "action": "action",
        "state": "observation.state",
        "cameras": CAMERAS,
        "read_image": read,
        "names": {"action": NAMES, "observation.state": NAMES} if names else {},
    }
    return RecordedData(**(made | changes))
