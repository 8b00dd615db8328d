"""`check_reward_model` accepts a model that keeps to the contract, and finds what is wrong with others."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl import RewardModel
from vla_rl.testing import CheckFailed, check_reward_model
from vla_rl.toolkit.reward_models.folder import ClassifierShape
from vla_rl.toolkit.reward_models.success_classifier import SuccessClassifier


class Bright(RewardModel):
    """Success by the brightness of the first camera."""

    def success_probability(self, obs):
        images = next(iter(obs.images.values()))
        return images.mean((1, 2, 3)).astype(np.float32) / 255


class Percent(Bright):
    def success_probability(self, obs):
        return 100 * super().success_probability(obs)


class Jointly(Bright):
    def success_probability(self, obs):
        return super().success_probability(obs) / len(obs)


class Moody(Bright):
    calls = 0

    def success_probability(self, obs):
        self.calls += 1
        return super().success_probability(obs) / self.calls


class Column(Bright):
    def success_probability(self, obs):
        return super().success_probability(obs)[:, None]


class Learnt(RewardModel):
    """The network of the plugin `classifier`, with random weights."""

    def __init__(self) -> None:
        from vla_rl.testing.synthetic import env_info

        info = env_info()
        instructions = tuple(task.instruction for task in info.tasks)
        self.model = SuccessClassifier(
            ClassifierShape(cameras=tuple(info.cameras), instructions=instructions, image_size=16)
        )

    def success_probability(self, obs):
        return self.model.predict_success(obs)


@pytest.mark.parametrize("model", [Bright, Learnt])
def test_good_models_pass(model):
    check_reward_model(model())


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (Percent, "expected probabilities from 0 to 1"),
        (Jointly, "expected the answer of each observation alone"),
        (Moody, "expected the same answer to the same observations"),
        (Column, r"expected shape \(4,\), got \(4, 1\)"),
    ],
)
def test_mutants_are_found(mutant, text):
    with pytest.raises(CheckFailed, match=text):
        check_reward_model(mutant())
