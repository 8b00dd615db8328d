"""A success classifier is learnt from recordings, told apart by the instruction, and equal whenever it is learnt again."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest
import torch
from tabletop_data import tabletop_data
from typer.testing import CliRunner

import vla_rl
from vla_rl import Observation, RecordedRewards
from vla_rl.cli.fit_rewards import fit_and_save, open_frames
from vla_rl.cli.main import app
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
    fit_and_save(open_frames(recordings, (), None), folder, SETTINGS, "cpu", print)
    return folder


def test_held_out_episodes_are_classified_correctly(classifier):
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
    vla_rl.fit_rewards(recordings, tmp_path / "few", steps=5, image_size=32, device="cpu")
    again = fit_classifier(data, settings)
    other_seed = fit_classifier(data, ClassifierSettings(steps=5, image_size=32, seed=1))
    loaded = load_classifier(tmp_path / "few", "cpu")
    assert torch.equal(loaded.predict_success(obs), again.predict_success(obs))
    assert not torch.equal(loaded.predict_success(obs), other_seed.predict_success(obs))
    assert loaded.shape == again.shape
    assert loaded.shape.cameras == ("overhead", "wrist")


class Matches(InMemoryDataset):
    """Episodes of one frame: a square of one of two colours, which is a success where the instruction names it."""

    TEXTS = ("red", "blue")

    def __init__(self, count: int) -> None:
        draws = np.random.default_rng(0)
        colours = draws.integers(2, size=count)
        named = draws.integers(2, size=count)
        images = np.full((count, 16, 16, 3), 120, np.uint8)
        for image, colour in zip(images, colours, strict=True):
            down, right = draws.integers(10, size=2)
            image[down : down + 6, right : right + 6] = ((230, 30, 30), (30, 60, 240))[colour]
        texts = tuple(self.TEXTS[i] for i in named)
        super().__init__([(Observation(images={"top": images}, instructions=texts), np.zeros((count, 1, 1)))])
        self.solved = colours == named

    def read_rewards(self, indices, discount):
        rewards = self.solved[indices].astype(np.float32)
        return RecordedRewards(rewards=rewards, following=np.full(len(indices), -1))


def test_the_instruction_is_read():
    fitted = fit_classifier(Matches(200), ClassifierSettings(steps=150, batch=32, image_size=16)).shape.fitted
    assert fitted["frame_accuracy"] >= 0.9


def test_one_camera_is_enough(recordings, tmp_path):
    folder = tmp_path / "one"
    keys = {"cameras": ["wrist"], "steps": 1, "image_size": 16, "device": "cpu"}
    assert vla_rl.fit_rewards(recordings, folder, **keys)["held_out_episodes"] == 16
    some = vla_rl.fit_rewards(recordings, tmp_path / "some", episodes={"exclude": ["40-79"]}, **keys)
    assert some["held_out_episodes"] == 8
    assert load_classifier(tmp_path / "one", "cpu").shape.cameras == ("wrist",)


def test_unknown_instructions_and_cameras_are_refused(classifier):
    model = load_classifier(classifier, "cpu")
    image = np.zeros((1, 32, 32, 3), np.uint8)
    images = {"overhead": image, "wrist": image}
    with pytest.raises(UserError, match="does not know the instruction 'dance'.*'pick up the blue block'"):
        model.predict_success(Observation(images=images, instructions=("dance",)))
    with pytest.raises(UserError, match="looks at camera 'overhead', and the simulator has: wrist"):
        model.predict_success(Observation(images={"wrist": image}, instructions=("pick up the red block",)))


def test_samples_of_a_batch_are_independent():
    shape = ClassifierShape(cameras=("top",), instructions=("go",), image_size=16)
    torch.manual_seed(0)
    model = SuccessClassifier(shape).eval()
    images = np.random.default_rng(0).integers(0, 255, (3, 20, 24, 3), np.uint8)
    obs = Observation(images={"top": images}, instructions=("go",) * 3)
    alone = torch.cat([model.predict_success(obs.take(np.array([i]))) for i in range(3)])
    assert torch.allclose(model.predict_success(obs), alone, atol=1e-6)


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
        ({"episodes": "{exclude: [99]}"}, "has no episode 99, which `episodes` names"),
        ({"episodes": "{only: 3}"}, "--episodes.only: unknown key"),
        ({"episodes": "{only: "}, "--episodes: not valid YAML"),
    ],
)
def test_data_without_what_is_asked_for_are_refused(recordings, tmp_path, options, text):
    with pytest.raises(UserError, match=text):
        vla_rl.fit_rewards(recordings, tmp_path / "x", **options)


@pytest.mark.parametrize(
    ("to", "device", "text"),
    [
        ("/proc/classifier", "cpu", "the classifier's folder /proc/classifier cannot be used: there is no such file"),
        ("file", "cpu", "the classifier's folder file cannot be used: it is a file and not a folder"),
        ("file/x", "cpu", "the classifier's folder file/x cannot be used: a part of it is a file"),
        ("full", "cpu", "full exists and is not empty; give the name of a new folder"),
        ("new", "banana", "there is no device 'banana'; torch sees: cpu"),
        ("new", "cuda:99", "there is no device 'cuda:99'; torch sees: cpu"),
    ],
)
def test_outputs_and_the_device_are_tried_before_training(recordings, tmp_path, monkeypatch, to, device, text):
    def trained(*_, **__):
        raise AssertionError("trained before the output was tried")

    monkeypatch.setattr("vla_rl.cli.fit_rewards.fit_classifier", trained)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").touch()
    done = CliRunner().invoke(app, ["fit-rewards", str(recordings), "--to", to, "--device", device])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True), done.output
    assert text in " ".join(done.output.split()) and len(done.output.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_an_empty_folder_is_filled_and_a_failed_write_leaves_none_behind(classifier, tmp_path, monkeypatch):
    model = load_classifier(classifier, "cpu")
    (tmp_path / "empty").mkdir()
    tmp_path.chmod(0o555)  # a mounted folder may be written, and the one above it not
    save_classifier(model, tmp_path / "empty")
    tmp_path.chmod(0o755)
    assert read_shape(tmp_path / "empty").fitted == read_shape(classifier).fitted

    def full(*_):
        raise OSError(errno.ENOSPC, "", "config.json")

    monkeypatch.setattr("vla_rl.toolkit.reward_models.success_classifier.write_whole", full)
    with pytest.raises(UserError, match="its disk is full"):
        save_classifier(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_folders_that_hold_something_else_are_refused(classifier, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        save_classifier(load_classifier(classifier, "cpu"), tmp_path)
    with pytest.raises(UserError, match=r"has no config.json; write a classifier with `vla-rl fit-rewards"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"kind": "policy"}))
    with pytest.raises(UserError, match="success_classifier"):
        read_shape(tmp_path)
