"""A reward model judges success, rewards and ends in place of the simulator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import sleep

import numpy as np
import pytest
from attrs import evolve

from vla_rl.core.errors import PluginError
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import ChunkResult, Observation
from vla_rl.runtime.workers.env.reward_scorer import RewardScorer


class Told(RewardModel):
    """Says what the first pixel of each image says, in hundredths."""

    def __init__(self) -> None:
        self.ends = None

    def success_probability(self, obs, ends):
        self.ends = ends
        return obs.images["top"][:, 0, 0, 0].astype(np.float32) / 100


def result_of(hundredths, *, executed=None, terminated=(), truncated=(), rewards=0.5) -> ChunkResult:
    """A chunk of three actions in which the simulator calls everything solved."""
    n = len(hundredths)
    images = np.zeros((n, 4, 4, 3), np.uint8)
    images[:, 0, 0, 0] = hundredths
    flags = {"terminated": np.zeros((n, 3), bool), "truncated": np.zeros((n, 3), bool)}
    for name, places in (("terminated", terminated), ("truncated", truncated)):
        for place in places:
            flags[name][place] = True
    return ChunkResult(
        obs=Observation(images={"top": images}, instructions=("go",) * n),
        rewards=np.full((n, 3), rewards, np.float32),
        executed=np.ones((n, 3), bool) if executed is None else executed,
        success=np.ones(n, bool),
        succeeded=np.ones((n, 3), bool),
        **flags,
    )


def scored(result, *, active=None, remaining=100, threshold=0.5, **options):
    n = len(result.success)
    model = Told()
    scorer = RewardScorer(model, name="told", threshold=threshold)
    active = np.ones(n, bool) if active is None else active
    return scorer.score_chunk(result, active, np.full(n, remaining), **options), model


def test_success_ends_the_episode_with_a_reward_of_one():
    result, model = scored(result_of([90, 10]))
    assert result.success.tolist() == [True, False]
    assert result.rewards.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert result.terminated.tolist() == [[False, False, True], [False] * 3]
    assert result.succeeded is None
    assert model.ends.tolist() == [False, False]


@pytest.mark.parametrize(("threshold", "success"), [(0.9, True), (0.91, False)])
def test_the_threshold_counts(threshold, success):
    assert scored(result_of([90]), threshold=threshold)[0].success.tolist() == [success]


def test_the_end_of_the_simulator_stays_an_end():
    """The last valid action gets the reward, whether the rest of the chunk was executed (the first env) or not."""
    executed = np.array([[True, True, True], [True, True, False], [True, True, False]])
    result = result_of([90, 10, 90], executed=executed, terminated=[(0, 1), (1, 1)], truncated=[(2, 1)])
    result, model = scored(result)
    assert result.rewards.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert result.terminated.tolist() == [[False, True, False], [False, True, False], [False, True, False]]
    assert not result.truncated.any()
    assert model.ends.tolist() == [True, True, True]


def test_the_step_limit_is_an_end():
    result, model = scored(result_of([90, 10]), remaining=2)
    assert result.rewards.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert model.ends.tolist() == [True, True]


def test_terminations_that_are_ignored_are_not_ends():
    result, model = scored(result_of([90], terminated=[(0, 0)]), ignore_terminations=True)
    assert result.rewards.tolist() == [[0, 0, 1]]
    assert model.ends.tolist() == [False]


def test_only_envs_that_acted_are_judged():
    executed = np.array([[True] * 3, [True] * 3, [False] * 3])
    result, model = scored(result_of([90, 90, 90], executed=executed), active=np.array([True, False, True]))
    assert result.success.tolist() == [True, False, False]
    assert len(model.ends) == 1


def test_the_simulators_arrays_are_left_alone():
    before = result_of([90])
    kept = evolve(before, terminated=before.terminated.copy(), rewards=before.rewards.copy())
    scored(before)
    assert (before.terminated == kept.terminated).all()
    assert (before.rewards == kept.rewards).all()


@pytest.mark.parametrize("answer", [np.array([1.5]), np.array([np.nan]), np.zeros(2), np.zeros((1, 1))])
def test_an_answer_that_is_not_a_probability_is_refused(answer):
    class Wrong(RewardModel):
        def success_probability(self, obs, ends):
            return answer

    scorer = RewardScorer(Wrong(), name="wrong", threshold=0.5)
    with pytest.raises(PluginError, match="reward model 'wrong': .*expected one probability from 0 to 1 for each"):
        scorer.score_chunk(result_of([90]), np.ones(1, bool), np.full(1, 9))


def test_a_failure_ends_the_episode_without_a_reward():
    class Both(Told):
        def failed(self, obs):
            return obs.images["top"][:, 0, 0, 0] != 50

    scorer = RewardScorer(Both(), name="both", threshold=0.5)
    result = scorer.score_chunk(result_of([10, 50, 90]), np.ones(3, bool), np.full(3, 9))
    assert result.success.tolist() == [False, True, True]
    assert result.rewards.sum(1).tolist() == [0, 1, 1]
    assert result.terminated.tolist() == [[False, False, True]] * 3


@pytest.mark.parametrize("answer", [np.zeros(2, bool), np.zeros(1)])
def test_failures_of_another_form_are_refused(answer):
    class Wrong(Told):
        def failed(self, obs):
            return answer

    scorer = RewardScorer(Wrong(), name="wrong", threshold=0.5)
    with pytest.raises(PluginError, match="reward model 'wrong': failed returned .*expected True or False for each"):
        scorer.score_chunk(result_of([90]), np.ones(1, bool), np.full(1, 9))


def test_without_success_to_tell_the_simulators_stays():
    before = result_of([10])
    scorer = RewardScorer(Told(), name="told", threshold=0.5, judges_success=False)
    assert scorer.score_chunk(before, np.ones(1, bool), np.full(1, 9)) is before


def test_lanes_ask_one_after_the_other():
    class Alone(Told):
        busy = False

        def watch(self, obs):
            assert not self.busy
            self.busy = True
            sleep(0.002)
            self.busy = False

    model, lock = Alone(), Lock()
    scorers = [RewardScorer(model, lock, name="alone", threshold=0.5) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(scorers[i % 2].watch_observations, None) for i in range(20)]
        assert [call.result() for call in calls] == [None] * 20
