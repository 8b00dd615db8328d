"""Traces of episodes, and descriptions of the difference between two."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from attrs import define, field, frozen

from vla_rl.core.types import ActionSource, Array, Observation, to_numpy

ROUNDING = 1e-6
NUMBERS = 1e-4
"""Difference of numbers that is tolerated, absolute; 1e-5 of the number is added."""


@frozen(eq=False)
class EnvView:
    """The observation of one env."""

    images: Mapping[str, Array]
    """Camera -> uint8 [H, W, 3]."""
    state: Array | None
    instruction: str

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The images, and the state if there is one."""
        return self.images if self.state is None else {**self.images, "state": self.state}

    @property
    def view_hash(self) -> bytes:
        """Equal for views that are equal."""
        parts = [*(array.tobytes() for array in self.arrays.values()), self.instruction.encode()]
        return b"".join(blake2b(part, digest_size=12).digest() for part in parts)


@frozen
class Slack:
    """Differences that are tolerated: mean of an image's pixels (of 255), of the numbers of a state, and of the mean
    colour of a region of an image (of 255)."""

    pixels: float
    numbers: float = NUMBERS
    region: float = 255.0


EXACT = Slack(0.0, 0.0)


def copy_views(obs: Observation) -> list[EnvView]:
    """Copies of what each env showed."""
    images = {name: np.array(to_numpy(image)) for name, image in obs.images.items()}
    state = None if obs.state is None else np.array(to_numpy(obs.state))
    return [
        EnvView({name: image[i] for name, image in images.items()}, None if state is None else state[i], sentence)
        for i, sentence in enumerate(obs.instructions)
    ]


def image_gap(one: EnvView, two: EnvView, name: str) -> float:
    """Mean absolute difference of a camera's images, of 255."""
    return float(np.abs(one.images[name].astype(np.int16) - two.images[name]).mean())


def average_regions(image: Array) -> Array:
    """Return the mean colours of about 8 x 8 regions of an image, float32 [rows, columns, 3]."""
    height, width = (max(side // 8, 1) for side in image.shape[:2])
    rows = np.add.reduceat(image.astype(np.float32), np.arange(0, image.shape[0], height), axis=0)
    small: Array = np.add.reduceat(rows, np.arange(0, image.shape[1], width), axis=1) / (height * width)
    return small


def region_gaps(one: EnvView, two: EnvView, name: str) -> Array:
    """Differences of the mean colours of the regions of a camera's images, of 255. A small object that is elsewhere
    changes a region, and the noise of a renderer averages out in it."""
    gaps: Array = np.abs(average_regions(one.images[name]) - average_regions(two.images[name]))
    return gaps


def describe_gap(one: EnvView, two: EnvView, slack: Slack) -> str:
    """Describe how two views differ; empty if they do not. If the states differ by more than rounding, but within a
    wider slack, differences of the images do not show an error."""
    cameras = [name for name in one.images if name in two.images]
    if one.state is not None and two.state is not None:
        apart = np.abs(one.state - two.state)
        far = apart > slack.numbers + 1e-5 * np.abs(one.state)
        if far.any():
            numbers = ", ".join(str(i) for i in np.flatnonzero(far)[:6])
            return f"state that differs by {float(apart.max()):.2g} (number {numbers})"
        cameras = [] if slack.numbers > NUMBERS and apart.max(initial=0) > ROUNDING else cameras
    for name in cameras:
        size = image_gap(one, two, name)
        if size > slack.pixels:
            return f"image {name!r} that differs by {size:.2g} of 255 on average"
        if size and slack.region < 255.0 and (region := region_gaps(one, two, name).max()) > slack.region:
            return f"image {name!r} with a region whose mean colour differs by {region:.2g} of 255"
    if one.instruction != two.instruction:
        return f"instructions {one.instruction!r} and {two.instruction!r}"
    return ""


@frozen(eq=False)
class Script:
    """An episode to run: the state that it starts from, its seed, and what is done."""

    state: int
    seed: int
    actions: Array
    """float32 [T, A]."""
    kind: str
    """Kind of the actions, one of `KINDS`."""

    def __len__(self) -> int:
        return len(self.actions)

    def __str__(self) -> str:
        return f"state {self.state} with {self.kind} actions"


@frozen(eq=False)
class TraceStep:
    """What one action led to."""

    reward: float
    terminated: bool
    truncated: bool
    succeeded: bool | None
    source: int | None
    """`ActionSource`; None: no one can take over."""
    executed: Any
    """Numbers of the action that was executed, [A]; they need not mean anything where the policy acted."""

    @property
    def ends(self) -> bool:
        return self.terminated or self.truncated

    @property
    def by_policy(self) -> bool:
        return self.source in (None, ActionSource.POLICY)


@define(eq=False)
class EnvTrace:
    """The views and results of an env over a script."""

    script: Script
    env_id: int
    views: dict[int, EnvView]
    """Number of actions -> view after them; 0: after the reset."""
    stops: bool = True
    """It was run with `stop_at_end`."""
    success: dict[int, bool] = field(factory=dict)
    """Number of actions -> whether the episode had succeeded after them."""
    steps: list[TraceStep] = field(factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return f"env {self.env_id}, {self.script}"

    @property
    def end_step(self) -> int | None:
        """Number of the first action that ended the episode, counted from 1."""
        return next((t for t, step in enumerate(self.steps, 1) if step.ends), None)

    @property
    def end_or_length(self) -> int:
        return self.end_step or len(self)

    @property
    def has_won(self) -> bool:
        return any(self.success.values()) or any(step.succeeded for step in self.steps)


def describe_difference(one: EnvTrace, two: EnvTrace, slack: Slack, upto: int | None = None) -> str:
    """Describe the first difference between the traces of one script; parts that only one of them has do not count.
    `upto`: ignore actions after it."""
    length = min(len(one), len(two)) if upto is None else min(len(one), len(two), upto)
    for t in range(length + 1):
        deviation = _step_difference(one.steps[t - 1], two.steps[t - 1]) if t else ""
        if not deviation and t in one.views and t in two.views:
            deviation = describe_gap(one.views[t], two.views[t], slack)
        if not deviation and t in one.success and t in two.success and one.success[t] != two.success[t]:
            deviation = f"success {two.success[t]} instead of {one.success[t]}"
        if deviation:
            return f"after {t} actions: {deviation}" if t else f"after the reset: {deviation}"
    if upto is None and len(one) != len(two):
        return f"{len(two)} executed actions instead of {len(one)}"
    return ""


def _step_difference(one: TraceStep, two: TraceStep) -> str:
    for name in ("terminated", "truncated", "succeeded", "source"):
        a, b = getattr(one, name), getattr(two, name)
        if a is not None and b is not None and a != b:
            return f"{name} {b} instead of {a}"
    if not one.by_policy and not np.allclose(one.executed, two.executed, 1e-5, NUMBERS):
        return f"executed_actions {two.executed} instead of {one.executed}"
    a, b = one.reward, two.reward
    return f"reward {b:.6g} instead of {a:.6g}" if abs(a - b) > NUMBERS + 1e-5 * abs(a) else ""
