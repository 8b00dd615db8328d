"""Reward models with one mistake each, which `check_reward_model` finds; and others that pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl import RewardModel
from vla_rl.testing import CheckFailed, check_reward_model
from vla_rl.testing.synthetic import env_info, observation

MUTANTS: dict[type[RewardModel], str] = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


def check(mutant):
    check_reward_model(mutant())


class Bright(RewardModel):
    """Success by the brightness of the first camera; a dark image is a failure."""

    def success_probability(self, obs, ends):
        return self.brightness(obs)

    def brightness(self, obs):
        images = np.asarray(next(iter(obs.images.values())))
        return images.mean((1, 2, 3)).astype(np.float32) / 255

    def failed(self, obs):
        return self.brightness(obs) < 0.1


@found_by("probabilities from 0 to 1")
class Logits(Bright):
    def success_probability(self, obs, ends):
        return 20 * self.brightness(obs) - 10


@found_by("an answer that depends on the observation, got always 0.5")
class Constant(Bright):
    def success_probability(self, obs, ends):
        return np.full(len(obs), 0.5, np.float32)

    def failed(self, obs):
        return None


@found_by("the answer of each observation alone")
class Sorted(Bright):
    def success_probability(self, obs, ends):
        return np.sort(self.brightness(obs))


@found_by("the answer of each observation alone")
class RelativeToTheBatch(Bright):
    def success_probability(self, obs, ends):
        bright = self.brightness(obs)
        return (bright == bright.max()).astype(np.float32)


@found_by("None, or bool [4], got bool [4, 1]")
class FailuresAsColumn(Bright):
    def failed(self, obs):
        return super().failed(obs)[:, None]


@found_by("None, or bool [4], got int64")
class FailuresAsNumbers(Bright):
    def failed(self, obs):
        return np.flatnonzero(super().failed(obs))


class FailsWhateverIsNotSolved(Bright):
    def failed(self, obs):
        return np.ones(len(obs), bool)


@found_by("'NoneType' object has no attribute 'images'")
class WatchesImagesAlone(Bright):
    watches = True

    def watch(self, obs):
        self.seen = len(obs.images)


@found_by("close: expected no exception")
class ClosesOnce(Bright):
    def __init__(self):
        self.file = torch.zeros(1)

    def close(self):
        del self.file


@found_by("the answer of each observation alone")
class RemembersTheLastEpisode(Bright):
    best = 0.0

    def success_probability(self, obs, ends):
        bright = self.brightness(obs)
        if isinstance(self.best, float):
            self.best = np.zeros(64, np.float32)
        self.best[: len(obs)] = np.maximum(self.best[: len(obs)], bright)
        return self.best[: len(obs)].copy()


@found_by("all envs are reset together")
class ResetsAllOrNone(Bright):
    def before_reset(self, env_ids):
        if len(env_ids) != 4:
            raise ValueError("all envs are reset together")


@found_by("the same answer to the same observations")
class RandomWhereUnsure(Bright):
    def success_probability(self, obs, ends):
        return np.clip(self.brightness(obs) + 0.1 * np.random.default_rng().random(len(obs)), 0, 1).astype(np.float32)


@found_by("images and a state that stay as they are")
class ScalesInPlace(Bright):
    def success_probability(self, obs, ends):
        images = next(iter(obs.images.values()))
        bright = images.mean((1, 2, 3)).astype(np.float32) / 255
        images //= 2
        return bright


@found_by("probabilities from 0 to 1, got [nan")
class ContrastOfBlack(Bright):
    def success_probability(self, obs, ends):
        images = np.asarray(next(iter(obs.images.values())), np.float32)
        with np.errstate(invalid="ignore", divide="ignore"):
            scaled = (images - images.mean((1, 2, 3), keepdims=True)) / images.std((1, 2, 3), keepdims=True)
        return 1 / (1 + np.exp(-scaled[:, 0, 0, 0]))


@found_by("the same answer where an episode ends")
class SuccessAtEveryEnd(Bright):
    def success_probability(self, obs, ends):
        return np.where(ends, 1.0, self.brightness(obs)).astype(np.float32)


@found_by("failed: expected the same answer to the same observations")
class FailsAtRandom(Bright):
    def __init__(self):
        self.draws = np.random.default_rng(0)

    def failed(self, obs):
        return self.draws.random(len(obs)) < 0.5


@found_by("failed: expected the same answer to the same observations")
class FailsAtTimes(Bright):
    calls = 0

    def failed(self, obs):
        self.calls += 1
        return super().failed(obs) if self.calls % 2 else None


@found_by("success_probability: expected the global random generators left alone, got a change of torch's")
class DrawsInVain(Bright):
    def success_probability(self, obs, ends):
        torch.rand(1)
        return super().success_probability(obs, ends)


@found_by("failed: expected the global random generators left alone, got a change of NumPy's")
class SeedsInFailed(Bright):
    def failed(self, obs):
        np.random.seed(0)  # noqa: NPY002
        return super().failed(obs)


@found_by("an answer that depends on the observation, got always 0")
class NeverSolved(Bright):
    def success_probability(self, obs, ends):
        return np.zeros(len(obs), np.float32)


@found_by("an answer that depends on the observation, got always 1")
class AlwaysSolved(Bright):
    def success_probability(self, obs, ends):
        return np.ones(len(obs), np.float32)


@found_by("a state that stay as they are")
class ClipsTheState(Bright):
    def success_probability(self, obs, ends):
        np.clip(obs.state, -0.1, 0.1, out=obs.state)
        return super().success_probability(obs, ends)


class IsRed(RewardModel):
    """A threshold on a colour."""

    def success_probability(self, obs, ends):
        red, green, blue = np.moveaxis(np.asarray(next(iter(obs.images.values())), np.float32).mean((1, 2)), -1, 0)
        return ((red > 200) & (green < 50) & (blue < 50)).astype(np.float32)


class IsLifted(RewardModel):
    """A threshold on a number of the state, in metres."""

    def success_probability(self, obs, ends):
        return (np.asarray(obs.state)[:, 2] > 3.0).astype(np.float32)


class SeesTheMarker(RewardModel):
    """Looks for one pattern of pixels, which no made-up image has."""

    def success_probability(self, obs, ends):
        image = np.asarray(obs.images["camera0"])
        return np.array([np.array_equal(row[:2, :2, 0], MARKER) for row in image], np.float32)


MARKER = np.array([[3, 200], [100, 7]], np.uint8)


@pytest.mark.parametrize("model", [IsRed, IsLifted])
def test_hard_thresholds_pass(model):
    check_reward_model(model())


def test_a_model_of_a_rare_success_passes_with_an_example_of_it():
    with pytest.raises(CheckFailed, match="give `examples`, with a success among them"):
        check_reward_model(SeesTheMarker())
    examples = observation(env_info(), 1)
    np.asarray(examples.images["camera0"])[0, :2, :2, 0] = MARKER
    check_reward_model(SeesTheMarker(), examples=examples)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant):
    with pytest.raises(CheckFailed) as failed:
        check(mutant)
    assert any(MUTANTS[mutant] in finding for finding in failed.value.findings), failed.value
