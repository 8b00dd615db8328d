"""`check_world_model` finds what a world model does wrong, and nothing wrong with one that is right."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl import Observation, WorldModel
from vla_rl.testing import CheckFailed, check_world_model
from vla_rl.testing.synthetic import env_info

INFO = env_info(cameras=1, pixels=8)


class Still(WorldModel):
    """Nothing moves; outcomes are as frequent as those seen."""

    history = 2

    def __init__(self):
        self.seen = np.ones(5)

    def fit(self, windows, noise):
        self.seen += np.bincount(windows.outcomes[windows.executed.any(-1)], minlength=5)
        return {"chunks": float(self.seen.sum())}

    def imagine(self, windows, actions, noise):
        images = {camera: frames[:, -1] for camera, frames in windows.images.items()}
        return Observation(images=images, instructions=windows.instructions, state=windows.state[:, -1])

    def outcome(self, windows, actions, after):
        return np.repeat((self.seen / self.seen.sum()).astype(np.float32)[None], len(actions), axis=0)

    def training_state(self):
        return {"seen": self.seen}

    def load_training_state(self, state):
        self.seen = np.array(state["seen"])


def test_one_that_is_right_passes():
    check_world_model(Still(), env=INFO)


class Forgets(Still):
    def training_state(self):
        return {"seen": np.ones(5)}


class NotProbabilities(Still):
    def outcome(self, windows, actions, after):
        return 2 * super().outcome(windows, actions, after)


class Shares(Still):
    def imagine(self, windows, actions, noise):
        obs = super().imagine(windows, actions, noise)
        return Observation(images=obs.images, instructions=obs.instructions, state=obs.state + 9 * len(actions))


class Remembers(Still):
    calls = 0

    def imagine(self, windows, actions, noise):
        self.calls += 1
        obs = super().imagine(windows, actions, noise)
        return Observation(images=obs.images, instructions=obs.instructions, state=obs.state + np.float32(self.calls))


class Writes(Still):
    def imagine(self, windows, actions, noise):
        windows.state[:] = 0
        return super().imagine(windows, actions, noise)


class Floats(Still):
    def imagine(self, windows, actions, noise):
        obs = super().imagine(windows, actions, noise)
        return Observation(
            images={"camera0": obs.images["camera0"] / 255}, instructions=obs.instructions, state=obs.state
        )


class Diverges(Still):
    def fit(self, windows, noise):
        return {"loss": float("nan")}


@pytest.mark.parametrize(
    ("model", "finding"),
    [
        (Forgets, "load_training_state: expected to go on exactly"),
        (NotProbabilities, "outcome: expected probabilities"),
        (Shares, "a row alone as among others"),
        (Remembers, "the same for the same noise"),
        (Writes, "imagine: expected its windows unchanged"),
        (Floats, "expected uint8"),
        (Diverges, "expected a finite loss"),
    ],
)
def test_what_is_wrong_is_found(model, finding):
    with pytest.raises(CheckFailed, match=finding):
        check_world_model(model(), env=INFO)
