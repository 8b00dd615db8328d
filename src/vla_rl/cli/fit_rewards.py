"""`vla-rl fit-rewards`: a success classifier from recorded episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.catalogue import build, load
from vla_rl.core.contexts import DataContext
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.spec.yaml import parse_yaml
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.placement.hardware import check_device
from vla_rl.toolkit.json_files import Record, read_record
from vla_rl.toolkit.reward_models.fitting import ClassifierSettings, fit_classifier
from vla_rl.toolkit.reward_models.folder import check_new_folder
from vla_rl.toolkit.reward_models.success_classifier import save_classifier

IMAGES = "observation.images."
LABELS = ("next.success", "next.reward")
"""Features that say at which frames an episode succeeded; the first one that the data set has counts."""
REPORTED = 100
"""Optimiser steps per printed line."""


def fit_and_save(
    data: Demonstrations, to: Path, settings: ClassifierSettings, device: str | None, say: Callable[[str], object]
) -> Mapping[str, Any]:
    """Train a classifier on what `open_frames` gives, and write it to `to`. Return what it reaches on held-out
    episodes.

    Args:
        device: None: a GPU, if available.   say: receives lines about the loss.
    Raises UserError for data from which it cannot learn, and, before it learns, for a folder that cannot be written or
    is not empty, and a device that is not there.
    """

    def report_loss(step: int, loss: float) -> None:
        if step % REPORTED == 0 or step == settings.steps:
            say(f"step {step}/{settings.steps}: loss {loss:.4f}")

    check_new_folder(to)
    device = check_device(device)
    model = fit_classifier(data, settings, device, report_loss)
    save_classifier(model, to)
    return model.shape.fitted


def print_accuracy(fitted: Mapping[str, Any], given: Any) -> None:
    """Print what a classifier reaches, and where it is."""
    print(
        f"held-out episodes ({fitted['held_out_episodes']}): {fitted['episode_accuracy']:.1%} correct; frames: "
        f"{fitted['frame_accuracy']:.1%} correct, {fitted['missed_successes']:.1%} of those with success missed, "
        f"{fitted['false_successes']:.1%} of the others taken for success"
    )
    print(f"wrote {given.to}; use it with: rewards: {{type: classifier, folder: {given.to}}}")


def open_frames(folder: Path, cameras: Sequence[str], label: str | None, episodes: Any = None) -> Demonstrations:
    """Open a data set so that a sample is a frame, and rewards say where it shows success.

    Args:
        cameras: cameras to look at; empty: all.
        label: feature that is above 0 at frames of success; None: the first of `LABELS`.
        episodes: as the key `episodes` of the data plugin `lerobot`, or its YAML; None: all.
    Raises UserError for a folder of another kind.
    """
    if isinstance(episodes, str):
        document = parse_yaml(episodes)
        if document.errors:
            raise UserError(f"--episodes: {document.errors[0].message}")
        episodes = document.data
    info = read_record(folder / "meta" / "info.json")
    features = info.get_records("features")
    recorded = [name.removeprefix(IMAGES) for name in features if name.startswith(IMAGES)]
    for camera in cameras:
        if camera not in recorded:
            raise UserError(
                f"{folder} has no camera {camera!r}{did_you_mean(camera, recorded)}\n  it has: {', '.join(recorded)}"
            )
    if "action.executed" in features:
        raise UserError(
            f"{folder} has a row for each chunk, and a classifier learns from every frame; record with rows: steps"
        )
    chosen = label or next((name for name in LABELS if name in features), None)
    if chosen is None or chosen not in features:
        raise UserError(
            f"{folder} has no feature {chosen or LABELS[0]!r} that says where an episode succeeded; give --label\n"
            f"  it has: {', '.join(features)}"
        )
    if "action" not in features:
        raise UserError(f"{folder} has no feature 'action'; it is not a robot's data set")
    actions = math.prod(features["action"].get_sizes("shape"))
    env = EnvInfo(
        cameras={name: _image_size(features[IMAGES + name]) for name in cameras or recorded},
        state_dim=0,
        action_low=(-math.inf,) * actions,
        action_high=(math.inf,) * actions,
        tasks=(),
    )
    if not env.cameras:
        raise UserError(f"{folder} has no camera images ({IMAGES}...)")
    keys = {"folder": str(folder), "reward": chosen, "episodes": episodes}
    try:
        config = Structurer().read_value(keys, load("data", "lerobot").config)
    except Problems as exc:
        raise UserError(f"--{exc}") from exc
    opened: Demonstrations = build("data", "lerobot", config, DataContext(chunk=1, env=env))
    return opened


def _image_size(feature: Record) -> tuple[int, int]:
    """Return (height, width) of an image feature."""
    shape = feature.get_sizes("shape")
    if len(shape) != 3:
        raise feature.build_error("shape", "three sizes of an image")
    return (shape[1], shape[2]) if shape[0] in (1, 3) else (shape[0], shape[1])
