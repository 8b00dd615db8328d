"""A success classifier is learnt from recordings, told apart by the instruction, and equal whenever it is learnt again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tabletop_data import tabletop_data

import vla_rl
from vla_rl import Observation, RecordedRewards
from vla_rl.cli.fit_rewards import main, open_frames
from vla_rl.core.errors import UserError
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.reward_models.fitting import ClassifierSettings, fit_classifier
from vla_rl.toolkit.reward_models.folder import ClassifierShape, read_shape
from vla_rl.toolkit.reward_models.success_classifier import SuccessClassifier, load_classifier, save_classifier

SETTINGS = ClassifierSettings(steps=150, batch=32, image_size=32)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A data set of 80 episodes, about a third of them successful."""
    folder = tmp_path_factory.mktemp("recordings") / "data"
    tabletop_data(folder, 80, ("pick_red", "pick_blue"))
    return folder


@pytest.fixture(scope="module")
def classifier(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "fitted"
    main(recordings, folder, SETTINGS, cameras=(), label=None, device="cpu")
    return folder


def test_held_out_episodes_are_told_right(classifier):
    """Nine of ten held-out episodes; by chance it would be as many as fail, about two thirds."""
    fitted = read_shape(classifier).fitted
    assert fitted["held_out_episodes"] == 16
    assert fitted["episode_accuracy"] >= 0.9
    assert fitted["frame_accuracy"] >= 0.95
    assert fitted["missed_successes"] <= 0.2


def test_the_written_classifier_is_the_fitted_one(recordings, tmp_path):
    data = open_frames(recordings, (), None)
    obs, _ = data.read_samples(np.arange(40))
    settings = ClassifierSettings(steps=5, image_size=32)
    main(recordings, tmp_path / "few", settings, cameras=(), label=None, device="cpu")
    again = fit_classifier(data, settings)
    other_seed = fit_classifier(data, ClassifierSettings(steps=5, image_size=32, seed=1))
    loaded = load_classifier(tmp_path / "few", "cpu")
    assert torch.equal(loaded.probabilities(obs), again.probabilities(obs))
    assert not torch.equal(loaded.probabilities(obs), other_seed.probabilities(obs))
    assert loaded.shape == again.shape
    assert loaded.shape.cameras == ("overhead", "wrist")


class Matches(InMemoryDataset):
    """Episodes of one frame: a square of one of two colours, which is a success where the instruction names it."""

    TEXTS = ("red", "blue")

    def __init__(self, count: int) -> None:
        draws = np.random.default_rng(0)
        colours = draws.integers(2, size=count)
        named = draws.integers(2, size=count)
        pictures = np.full((count, 16, 16, 3), 120, np.uint8)
        for picture, colour in zip(pictures, colours, strict=True):
            down, right = draws.integers(10, size=2)
            picture[down : down + 6, right : right + 6] = ((230, 30, 30), (30, 60, 240))[colour]
        texts = tuple(self.TEXTS[i] for i in named)
        super().__init__([(Observation(images={"top": pictures}, instructions=texts), np.zeros((count, 1, 1)))])
        self.solved = colours == named

    def read_rewards(self, indices, discount):
        rewards = self.solved[indices].astype(np.float32)
        return RecordedRewards(rewards=rewards, following=np.full(len(indices), -1))


def test_the_instruction_is_read():
    fitted = fit_classifier(Matches(200), ClassifierSettings(steps=150, batch=32, image_size=16)).shape.fitted
    assert fitted["frame_accuracy"] >= 0.9


def test_one_camera_is_enough(recordings, tmp_path):
    folder = tmp_path / "one"
    fitted = vla_rl.fit_rewards(recordings, folder, cameras=["wrist"], steps=1, image_size=16, device="cpu")
    assert fitted["held_out_episodes"] == 16
    assert load_classifier(tmp_path / "one", "cpu").shape.cameras == ("wrist",)


def test_unknown_instructions_and_cameras_are_refused(classifier):
    model = load_classifier(classifier, "cpu")
    picture = np.zeros((1, 32, 32, 3), np.uint8)
    images = {"overhead": picture, "wrist": picture}
    with pytest.raises(UserError, match="does not know the instruction 'dance'.*'pick up the blue block'"):
        model.probabilities(Observation(images=images, instructions=("dance",)))
    with pytest.raises(UserError, match="looks at camera 'overhead', and the simulator has: wrist"):
        model.probabilities(Observation(images={"wrist": picture}, instructions=("pick up the red block",)))


def test_samples_of_a_batch_are_independent():
    shape = ClassifierShape(cameras=("top",), instructions=("go",), image_size=16)
    torch.manual_seed(0)
    model = SuccessClassifier(shape).eval()
    pictures = np.random.default_rng(0).integers(0, 255, (3, 20, 24, 3), np.uint8)
    obs = Observation(images={"top": pictures}, instructions=("go",) * 3)
    alone = torch.cat([model.probabilities(obs.take(np.array([i]))) for i in range(3)])
    assert torch.allclose(model.probabilities(obs), alone, atol=1e-6)


def test_recordings_of_one_outcome_are_refused():
    data = Matches(4)
    data.solved[:] = True
    with pytest.raises(UserError, match="4 successful and 0 unsuccessful episodes, and at least 2 of either"):
        fit_classifier(data, SETTINGS)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cameras": ("wirst",)}, "has no camera 'wirst'; did you mean 'wrist'"),
        ({"label": "success"}, "has no feature 'success' that says where an episode succeeded"),
    ],
)
def test_data_without_what_is_asked_for_are_refused(recordings, tmp_path, options, text):
    with pytest.raises(UserError, match=text):
        main(recordings, tmp_path / "x", SETTINGS, **{"cameras": (), "label": None, "device": "cpu"} | options)


def test_folders_that_hold_something_else_are_refused(classifier, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        save_classifier(load_classifier(classifier, "cpu"), tmp_path)
    with pytest.raises(UserError, match=r"has no config.json; write a classifier with `vla-rl fit-rewards"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"kind": "policy"}))
    with pytest.raises(UserError, match="success_classifier"):
        read_shape(tmp_path)
