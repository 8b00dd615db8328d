"""Whole runs with a reward model that judges success."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import field, frozen
from scripted_runs import scripted_spec, weights_in

from vla_rl import RewardModel, RewardModelPlugin
from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import parse_spec


@frozen(kw_only=True)
class SeesConfig:
    answer: str = field(default="state")


class Sees(RewardModel):
    """Success where the state's first number is positive, or never, whatever the simulator says."""

    def __init__(self, config: SeesConfig) -> None:
        self.never = config.answer == "never"

    def success_probability(self, obs):
        return np.zeros(len(obs), np.float32) if self.never else (obs.state[:, 0] > 0).astype(np.float32)


vla_rl_plugins = {
    "reward_model": {
        "sees": RewardModelPlugin(config=SeesConfig, build=lambda config, context: Sees(config), summary="a double")
    }
}
PLUGINS = {
    "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", __file__],
    "algorithm": {"type": "ppo"},
    "rollout": {"group_size": 1},
}
"""PPO, because success depends on the state alone, and GRPO drops groups whose trajectories are equal."""


def steps_of(metrics):
    return [line for line in metrics if "loss/policy" in line]


def test_rollouts_get_the_models_success_and_evaluations_the_simulators(train):
    """Episodes with a positive state succeed after their first chunk, whatever the policy does; the others continue to
    the simulator's end, and fail.
    """
    results, metrics = train("run", rewards={"type": "sees"}, **PLUGINS)
    plain, others = train("plain", **PLUGINS)
    assert results["success_before"] == plain["success_before"]
    (first, *_), (other, *_) = steps_of(metrics), steps_of(others)
    assert 0 < first["env/success_rate"] == first["env/return"] < 1
    assert first["env/episode_length"] < other["env/episode_length"]


@pytest.mark.parametrize(("evaluation", "some"), [(False, True), (True, False)])
def test_evaluations_are_judged_if_asked_for(train, evaluation, some):
    rewards = {"type": "sees", "answer": "never", "evaluation": evaluation}
    results, _ = train(rewards=rewards, train={"steps": 0}, **PLUGINS)
    (note,) = [note for note in results["notes"] if "reward model 'sees', threshold 0.5" in note]
    judged = "success" if evaluation else "success of rollouts (not of evaluations)"
    assert note == f"{judged} is judged by reward model 'sees', threshold 0.5, not by the simulator"
    assert (results["success"]["rate"] > 0) == some


def test_a_resumed_run_equals_one_that_went_through(train, tmp_path):
    options = {"rewards": {"type": "sees"}, **PLUGINS}
    _, whole = train("whole", **options)
    train("parts", train={"steps": 2}, **options)
    _, parts = train("parts", resume=True, **options)
    assert steps_of(parts) == steps_of(whole)
    first, second = weights_in(tmp_path / "whole"), weights_in(tmp_path / "parts")
    assert all((first[name] == second[name]).all() for name in first)
    assert len(steps_of(whole)) == 4


def test_a_classifier_that_is_not_there_is_refused(train):
    with pytest.raises(SpecError, match=r"rewards.folder: nowhere has no config.json; write a classifier with"):
        train(rewards={"type": "classifier", "folder": "nowhere"})


def test_a_threshold_of_zero_is_refused():
    with pytest.raises(SpecError, match="rewards.threshold"):
        parse_spec(scripted_spec(rewards={"type": "sees", "threshold": 0.0}, **PLUGINS))
