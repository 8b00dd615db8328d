"""Training of a success classifier from recorded episodes. A frame is positive where its row says that the episode
succeeded (`labels`), and negative elsewhere. Half of each batch is positive, because an episode has one such frame and
many others. Episodes are held out to measure the classifier."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.randomness import derived_seed, generator
from vla_rl.core.types import Array
from vla_rl.toolkit.reward_models.folder import SMALLEST_IMAGE, ClassifierShape
from vla_rl.toolkit.reward_models.success_classifier import SuccessClassifier

READ = 256
"""Frames that are read at a time."""
FEWEST = 2
"""Fewest episodes of either outcome: one to learn from, one to measure with."""
SHIFT = 2
"""Most pixels of a shift of images in training (random shift, Yarats et al. 2021)."""


@frozen(kw_only=True)
class ClassifierSettings:
    """Settings of the training of a success classifier."""

    steps: int = field(default=400, validator=v.ge(1))
    """Optimiser steps."""
    batch: int = field(default=64, validator=v.ge(2))
    """Frames of an optimiser step, half of them of success."""
    lr: float = field(default=1e-3, validator=v.gt(0))
    """Learning rate of AdamW."""
    held_out: float = field(default=0.2, validator=v.and_(v.gt(0), v.lt(1)))
    """Share of the episodes that measures the classifier and is never trained on."""
    threshold: float = field(default=0.5, validator=v.and_(v.gt(0), v.le(1)))
    """Probability from which a frame counts as success in the measures."""
    image_size: int = field(default=64, validator=v.and_(v.ge(SMALLEST_IMAGE), v.le(1024)))
    """Side to which images are scaled, in pixels."""
    seed: int = 0
    """Seed of the weights, the held-out episodes and the batches."""


@frozen(eq=False)
class _Frames:
    """All frames of a recording at the classifier's size."""

    images: torch.Tensor
    """uint8 [n, cameras, 3, size, size], in host memory."""
    instruction_ids: torch.Tensor
    """int64 [n], in host memory."""
    labels: Array
    """bool [n]: the frame shows success."""
    episodes: Array
    """int64 [n]: number of the episode."""

    @property
    def episode_outcomes(self) -> Array:
        """Return whether each episode has a frame of success, bool [episodes]."""
        return np.bincount(self.episodes, self.labels) > 0


def fit_classifier(
    data: Demonstrations,
    settings: ClassifierSettings,
    device: str = "cpu",
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> SuccessClassifier:
    """Train a classifier on the frames of recordings, whose rewards are 1 at frames of success.

    Args:
        data: recordings opened with `DataContext.chunk` 1, so that a sample is a frame.
        on_step: called after each optimiser step with its number and the loss.
    Returns the classifier; `shape.fitted` has what it reached on held-out episodes. Raises UserError for recordings
    with fewer than two episodes of either outcome.
    """
    frames, shape = _read_frames(data, settings)
    held_out = _held_out(frames, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(settings.seed, "success-classifier/weights"))
        model = SuccessClassifier(shape).to(device)
    train = ~held_out[frames.episodes]
    positive = np.flatnonzero(train & frames.labels)
    negative = np.flatnonzero(train & ~frames.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    model.train()
    for step in range(settings.steps):
        draws = generator(settings.seed, "success-classifier/batch", step)
        half = settings.batch // 2
        rows = np.concatenate([draws.choice(positive, half), draws.choice(negative, settings.batch - half)])
        labels = torch.as_tensor(frames.labels[rows], dtype=torch.float32).to(device)
        images = _shift_images(frames.images[rows].to(device), draws.integers(-SHIFT, SHIFT + 1, (len(rows), 2)))
        logits = model(images, frames.instruction_ids[rows].to(device))
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1 - step / settings.steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step(step + 1, loss.item())
    model.eval().requires_grad_(False)
    measured = measure_classifier(model, frames, held_out, settings.threshold)
    recorded = list_recorded_settings(settings)
    model.shape = evolve(shape, fitted={"episodes": len(frames.episode_outcomes), **recorded, **measured})
    return model


def list_recorded_settings(settings: ClassifierSettings) -> dict[str, Any]:
    """Return the settings that `config.json` records."""
    names = ("steps", "batch", "lr", "held_out", "threshold", "seed")
    return {name: getattr(settings, name) for name in names}


@torch.no_grad()
def measure_classifier(
    model: SuccessClassifier, frames: _Frames, held_out: Array, threshold: float
) -> Mapping[str, float]:
    """Return shares on held-out episodes: correct frames and episodes, frames of success that are missed, others taken
    for success. An episode is correct if a frame counts as success exactly when it succeeded."""
    rows = np.flatnonzero(held_out[frames.episodes])
    device = model.instruction.weight.device
    parts = [
        torch.sigmoid(model(frames.images[part].to(device), frames.instruction_ids[part].to(device))).cpu()
        for part in np.split(rows, range(READ, len(rows), READ))
    ]
    called = torch.cat(parts).numpy() >= threshold
    labels = frames.labels[rows]
    called_episodes = np.bincount(frames.episodes[rows], called, len(held_out)) > 0
    right = called_episodes == frames.episode_outcomes
    return {
        "held_out_episodes": int(held_out.sum()),
        "frame_accuracy": float((called == labels).mean()),
        "missed_successes": float((~called[labels]).mean()),
        "false_successes": float(called[~labels].mean()),
        "episode_accuracy": float(right[held_out].mean()),
    }


def _read_frames(data: Demonstrations, settings: ClassifierSettings) -> tuple[_Frames, ClassifierShape]:
    """Read all frames. Raises UserError for recordings from which nothing can be learnt."""
    count = data.num_samples()
    indices = np.arange(count)
    recorded = data.read_rewards(indices, 1.0)
    labels = recorded.rewards > 0
    last = recorded.following < 0
    episodes = np.concatenate([[0], np.cumsum(last)[:-1]]).astype(np.int64)
    outcomes = np.bincount(episodes, labels) > 0
    good = int(outcomes.sum())
    bad = len(outcomes) - good
    if min(good, bad) < FEWEST:
        raise UserError(
            f"the recordings have {good} successful and {bad} unsuccessful episodes, and at least {FEWEST} of either "
            "are needed: to learn from and to measure with"
        )
    first, _ = data.read_samples(indices[:1])
    parts = np.split(indices, range(READ, count, READ))
    shape = ClassifierShape(cameras=tuple(first.images), instructions=(), image_size=settings.image_size)
    scale = SuccessClassifier(evolve(shape, instructions=first.instructions))
    images = []
    instructions: list[str] = []
    for part in parts:
        obs, _ = data.read_samples(part)
        images.append(scale.scale_images(obs))
        instructions += obs.instructions
    known = tuple(sorted(set(instructions)))
    ids = torch.tensor([known.index(text) for text in instructions])
    frames = _Frames(torch.cat(images), ids, labels, episodes)
    return frames, evolve(shape, instructions=known)


def _held_out(frames: _Frames, settings: ClassifierSettings) -> Array:
    """Return which episodes are held out, bool [episodes]. Those of equal first images (a group) are held out together,
    else known scenes are measured. Raises UserError where either side lacks an outcome."""
    outcomes = frames.episode_outcomes
    first = np.flatnonzero(np.diff(frames.episodes, prepend=-1))
    starts = [hashlib.sha256(frames.images[row].numpy().tobytes()).digest() for row in first.tolist()]
    scenes = np.unique(np.array([start.hex() for start in starts]), return_inverse=True)[1]
    order = generator(settings.seed, "success-classifier/held-out").permutation(int(scenes.max()) + 1)
    held_out = np.zeros(len(outcomes), bool)
    for scene in order.tolist():
        if held_out.sum() >= settings.held_out * len(outcomes):
            break
        held_out |= scenes == scene
    for part, what in ((held_out, "held out"), (~held_out, "left to learn from")):
        if len(set(outcomes[part].tolist())) < 2:
            raise UserError(
                f"the recordings have {len(order)} different first images, and the episodes that are {what} "
                f"({int(part.sum())}) have only one outcome; record from more initial states, or change --held-out or "
                "--seed"
            )
    return held_out


def _shift_images(images: torch.Tensor, shifts: Array) -> torch.Tensor:
    """Return images uint8 [B, cameras, 3, size, size] shifted by (down, right) pixels, int64 [B, 2]; edges repeat."""
    size = images.shape[-1]
    cells = np.arange(size)
    rows = torch.as_tensor(np.clip(cells + shifts[:, :1], 0, size - 1), device=images.device)
    columns = torch.as_tensor(np.clip(cells + shifts[:, 1:], 0, size - 1), device=images.device)
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    # Advanced indices around slices come first in the result: [B, size, size, cameras, 3].
    shifted = images[sample, :, :, rows[:, :, None], columns[:, None, :]]
    return shifted.permute(0, 3, 4, 1, 2)
