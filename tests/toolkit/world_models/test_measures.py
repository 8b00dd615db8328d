"""Measures of world models: by hand, and of models that are wrong in a way that is known."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from vla_rl import Observation, WorldModel
from vla_rl.testing.synthetic import env_info
from vla_rl.testing.world_models import made_up_windows
from vla_rl.toolkit.world_models.measures import (
    THRESHOLDS,
    compute_psnr,
    measure_quality,
    roc_auc,
    roc_auc_error,
    thresholds_met,
)
from vla_rl.toolkit.world_models.windows import followed_by, frames_of, put_rows, take_frames

CHUNK, STEPS = 2, 3
INFO = env_info(cameras=2, pixels=8, bounds=((-1.0, 1.0),))


@pytest.fixture
def windows():
    """Episodes of 3 chunks; pixels brighten by what the chunk's first number says. Odd ones succeed at the end."""
    made = made_up_windows(INFO, 40, 1 + STEPS, CHUNK)
    for frames in made.images.values():
        frames[:, 0] = 100
        for t in range(STEPS):
            frames[:, t + 1] = frames[:, t] + np.round(20 * made.actions[:, t, :1, :1, None]).astype(np.int8)
    outcomes = np.zeros((40, STEPS), np.int64)
    outcomes[:, -1] = np.where(np.arange(40) % 2, 2, 4)
    return attrs.evolve(
        made, outcomes=outcomes, executed=np.ones((40, STEPS, CHUNK), bool), first=np.zeros(40, np.int64)
    )


class Knowing(WorldModel):
    """World model that knows such episodes. `deaf`: it ignores actions. An episode is a success where a state says so."""

    history = 1

    def __init__(self, deaf: bool = False, blind: bool = False):
        self.deaf, self.blind = deaf, blind

    def fit(self, windows, noise):
        return {}

    def imagine(self, windows, actions, noise):
        more = 0 if self.deaf else np.round(20 * actions[:, :1, :1, None]).astype(np.int8)
        images = {camera: (frames[:, -1] + more).astype(np.uint8) for camera, frames in windows.images.items()}
        return Observation(images=images, instructions=windows.instructions, state=windows.state[:, -1])

    def outcome(self, windows, actions, after):
        chances = np.zeros((len(actions), 1 + 2 * CHUNK), np.float32)
        late = windows.first == STEPS - 1
        odd = (windows.states % 2 == 1) & (not self.blind)
        chances[np.arange(len(actions)), np.where(late, np.where(odd, 2, 4), 0)] = 1
        return chances


def test_a_model_that_knows_has_the_best_measures(windows):
    found = measure_quality(Knowing(), windows)
    assert found["psnr/1"] == found["changed_psnr/3"] == math.inf and found["copy_changed_psnr/2"] < 40
    assert found["action_error"] == 0 and found["action_accuracy"] > 0.7, "rounded, two chunks may do the same"
    assert found["outcome_auc"] == found["replay_auc"] == 1 and found["replay_fpr"] == found["replay_fnr"] == 0
    assert thresholds_met(found) == dict.fromkeys(THRESHOLDS, True)


def test_a_model_that_ignores_actions_is_found_out(windows):
    found = measure_quality(Knowing(deaf=True), windows)
    assert found["action_error"] == 1 and found["action_accuracy"] == 0
    assert found["changed_psnr/1"] == found["copy_changed_psnr/1"]
    assert thresholds_met(found) == {"changed pixels": False, "actions": False, "replay": True}


def test_a_constant_outcome_is_found_out(windows):
    found = measure_quality(Knowing(blind=True), windows)
    assert found["replay_auc"] == found["outcome_auc"] == 0.5 and found["replay_fnr"] == 1
    assert not thresholds_met(found)["replay"]


class Guessing(Knowing):
    """Every image may turn out four levels brighter; the brighter, the likelier is success."""

    def imagine(self, windows, actions, noise):
        after = super().imagine(windows, actions, noise)
        luck = np.where(noise.uniforms() < 0.5, 0, 4).astype(np.uint8)[:, None, None, None]
        return attrs.evolve(after, images={camera: frames + luck for camera, frames in after.images.items()})

    def outcome(self, windows, actions, after):
        chances = np.zeros((len(actions), 1 + 2 * CHUNK), np.float32)
        chances[:, 1] = next(iter(after.images.values())).reshape(len(actions), -1).mean(1) / 255
        chances[:, 0] = 1 - chances[:, 1]
        return chances


def test_two_draws_of_a_model_that_guesses_disagree(windows):
    """By four levels in half of the images, and in those that follow as far as the guesses before differ."""
    found = measure_quality(Guessing(), windows)
    assert found["disagreement/1"] == pytest.approx(2, abs=0.8) and found["disagreement/3"] > found["disagreement/1"]
    mean = np.mean([found[f"disagreement/{k}"] for k in (1, 2, 3)])
    assert found["outcome_disagreement"] == pytest.approx(mean / 255, rel=1e-4)
    differing = measure_quality(Guessing(), windows, action_episodes=10)["disagreement/1"] * 10 / 4
    assert differing == pytest.approx(round(differing)), "of ten episodes"
    known = measure_quality(Knowing(), windows)
    assert known["disagreement/3"] == known["outcome_disagreement"] == 0


def test_chunks_that_were_not_played_do_not_count(windows):
    executed = windows.executed.copy()
    executed[:, 1:] = False
    found = measure_quality(Knowing(), attrs.evolve(windows, executed=executed))
    assert "psnr/1" in found and "psnr/2" not in found
    assert math.isnan(found["replay_auc"]), "no recorded episode succeeded"
    assert not thresholds_met(found)["replay"]


def test_roc_auc_by_hand():
    positive = np.array([False, False, True, True])
    assert roc_auc(np.array([0.1, 0.4, 0.35, 0.8]), positive) == 0.75
    assert roc_auc(np.array([1, 1, 1, 1]), positive) == 0.5
    assert roc_auc(np.array([0.1, 0.5, 0.5, 0.8]), positive) == 0.875
    assert math.isnan(roc_auc(np.ones(4), np.ones(4, bool)))


def test_the_error_of_an_area_by_hand():
    """The standard error of 32 and 32 is sqrt((0.09 + 31 (0.9 / 1.1 - 0.81) + 31 (1.62 / 1.9 - 0.81)) / 1024)."""
    assert roc_auc_error(0.9, 32, 32) == pytest.approx(0.04033, abs=1e-5)
    assert roc_auc_error(1.0, 32, 32) == 0 and math.isnan(roc_auc_error(math.nan, 0, 64))


def test_a_threshold_that_was_met_fails_for_more_than_chance(windows):
    good = measure_quality(Knowing(), windows)
    near = good | {"replay_auc": 0.87, "replay_auc_error": roc_auc_error(0.87, 32, 32)}
    assert not thresholds_met(near)["replay"] and thresholds_met(near, met_before=True)["replay"]
    certain = near | {"replay_auc_error": roc_auc_error(0.87, 320, 320)}
    assert not thresholds_met(certain, met_before=True)["replay"], "ten times the episodes: not by chance"
    assert not thresholds_met(measure_quality(Knowing(blind=True), windows), met_before=True)["replay"]


def test_psnr_by_hand():
    one, other = np.zeros((2, 2), np.uint8), np.array([[0, 10], [0, 0]], np.uint8)
    assert compute_psnr(one, other) == pytest.approx(10 * math.log10(255**2 / 25))
    assert compute_psnr(one, other, other > 0) == pytest.approx(10 * math.log10(255**2 / 100))
    assert compute_psnr(one, one) == math.inf


def test_windows_move_on_by_one_chunk(windows):
    past, seen = take_frames(windows, 0, 3), frames_of(windows, 3)
    arguments = windows.actions[:, 2], windows.executed[:, 2], windows.outcomes[:, 2]
    moved, want = followed_by(past, *arguments, seen), take_frames(windows, 1, 4)
    for name in ("state", "actions", "executed", "outcomes", "first"):
        assert np.array_equal(getattr(moved, name), getattr(want, name)), name
    assert all(np.array_equal(moved.images[camera], want.images[camera]) for camera in moved.images)
    short = followed_by(past, windows.actions[:, 2, :1], windows.executed[:, 2, :1], windows.outcomes[:, 2], seen)
    assert np.array_equal(short.executed[:, -1], [[True, False]] * 40)


def test_rows_can_be_put_back(windows):
    kept = windows.take(np.arange(40))
    changed = put_rows(kept, np.array([3, 1]), windows.take(np.array([1, 3])))
    assert changed.instructions[3] == windows.instructions[1] and changed.states[[1, 3]].tolist() == [3, 1]
    assert np.array_equal(changed.images["camera0"][1], windows.images["camera0"][3])
