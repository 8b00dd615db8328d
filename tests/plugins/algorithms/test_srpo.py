"""SRPO's rewards, its place in an algorithm, and what a run writes of them."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from algorithm_cases import cases_of

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.run.selection import take_columns
from vla_rl.core.spec.spec import make_component
from vla_rl.core.types import Requirements, Scores
from vla_rl.plugins.algorithms.srpo import plugin
from vla_rl.plugins.algorithms.srpo.config import RewardSettings, SRPOConfig
from vla_rl.plugins.algorithms.srpo.impl import SRPO, progress_rewards, success_centres
from vla_rl.testing import check_algorithm, synthetic
from vla_rl.toolkit.algorithms.policy_gradient import KLSettings, SuccessFilter

DEFAULT = RewardSettings()
CONFIG = SRPOConfig(encoder="tiny")


def array(entry) -> np.ndarray:
    if isinstance(entry, dict):
        return np.array(entry["data"], entry["dtype"]).reshape(entry["shape"])
    return np.array([np.nan if number is None else number for number in entry], np.float64)


# ----------------------------------------------------------------------------------------------------- rewards


def test_rewards_equal_the_reference():
    for _, case in cases_of("srpo_reward.json"):
        embeddings, success = array(case["embeddings"]), np.array(case["complete"], bool)
        progress = progress_rewards(embeddings, success, case["task_name"], embeddings.any(1), DEFAULT)
        for got, name in (
            (np.nan_to_num(progress.rewards), "reward"),
            (progress.distances, "distance"),
            (progress.normalized, "normalized_distance"),
        ):
            np.testing.assert_allclose(got, array(case[name]), atol=1e-6, err_msg=f"{case['id']}: {name}")


EMBEDDINGS = np.array([[0, 0], [0, 0], [10, 0], [10, 0], [2, 0], [10, 3], [5, 5]], np.float32)
SUCCESS = np.array([1, 1, 1, 1, 0, 0, 0], bool)
ALL = np.ones(7, bool)


def rewards(settings=DEFAULT, embeddings=EMBEDDINGS, success=SUCCESS, tasks=("a",) * 7, counted=ALL):
    return progress_rewards(embeddings, success, tasks, counted, settings)


def test_failures_are_paid_for_their_distance_to_the_nearest_cluster():
    progress = rewards()
    assert progress.distances[4:].tolist() == pytest.approx([2, 3, 50**0.5])
    near = (3 - 2) / (50**0.5 - 2)
    assert progress.normalized[4:].tolist() == pytest.approx([0, near, 1])
    sigmoid = [0.6 / (1 + np.exp(-10 * (0.5 - d))) for d in (0, near, 1)]
    assert progress.rewards.tolist() == pytest.approx([1, 1, 1, 1, *sigmoid])


def test_centres_are_in_raw_units_and_the_mean_without_clusters():
    assert success_centres(EMBEDDINGS[:4], DEFAULT).tolist() == [[0, 0], [10, 0]]
    far = np.array([[0, 0], [10, 0], [4, 9]], np.float32)
    np.testing.assert_allclose(success_centres(far, DEFAULT), far.mean(0, keepdims=True))


def test_tasks_are_apart():
    tasks = ("a", "a", "b", "b", "a", "b", "c")
    progress = rewards(tasks=tasks)
    assert progress.distances[4:6].tolist() == pytest.approx([2, 3])
    assert progress.rewards[4:].tolist() == pytest.approx([0.3, 0.3, 0.0]), "alone in its task; no success in c"
    assert np.isnan(progress.distances[6])


def test_who_does_not_count_neither_attracts_nor_is_paid():
    counted = np.array([1, 1, 0, 0, 1, 1, 0], bool)
    progress = rewards(counted=counted)
    assert progress.distances[5] == pytest.approx(109**0.5), "the cluster at (10, 0) is not there"
    assert np.isnan(progress.rewards[[2, 3, 6]]).all()


def test_the_width_of_the_clusters_counts():
    """A wide one makes of the two clusters one centre, at (5, 0)."""
    progress = rewards(attrs.evolve(DEFAULT, cluster_eps=3.0))
    assert progress.distances[4:].tolist() == pytest.approx([3, 34**0.5, 5])


def test_the_scale_of_the_sigmoid_counts():
    assert rewards(attrs.evolve(DEFAULT, reward_scale=0.3)).rewards[4] == pytest.approx(0.298, abs=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"encoder": ""}, {"frames": 1}, {"image_size": 8}, {"cluster_eps": 0.0},
        {"reward_scale": 1.1},
    ],
)  # fmt: skip
def test_keys_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        SRPOConfig(**{"encoder": "tiny", **change})


# --------------------------------------------------------------------------------------------------- algorithm


def rollout(success=(1, 0, 0, 1, 0, 0, 0, 0), lengths=(3, 6, 6, 2, 6, 6, 6, 6)):
    """Two groups of four, of one task; trajectory i ends at action `lengths[i]`, failures at the limit of 6."""
    won, at = torch.tensor(success, dtype=torch.bool), torch.tensor(lengths) - 1
    steps = torch.arange(6)[:, None]
    valid, ends = steps <= at, steps == at
    shaped = lambda flat: flat.reshape(3, 2, 8).transpose(1, 2)  # noqa: E731
    drawn = synthetic.rollout(chunk_steps=3, groups=2, group_size=4, chunk=2, features=4)
    return drawn.evolve(
        rewards=shaped((ends & won).float() + 0.25 * valid),
        terminated=shaped(ends & won),
        truncated=shaped(ends & ~won),
        valid=shaped(valid),
        success=won,
        tasks=("a",) * 8,
    )


def scores(rewards):
    return rewards.sum((0, 2)).tolist()


def test_one_reward_a_trajectory_at_its_last_action():
    before = rollout()
    shaped = SRPO(CONFIG, AlgorithmContext()).shape_rewards(before)
    assert shaped.rewards[:, 0].tolist() == [[0, 0], [1, 0], [0, 0]], "a success at its third action"
    assert shaped.rewards[:, 1].flatten()[:5].tolist() == [0] * 5 and 0 < shaped.rewards[2, 1, 1] < 0.6
    assert scores(shaped.rewards)[:4] == pytest.approx(shaped.findings["reward"][:4].tolist())
    assert scores(before.rewards)[0] == 1.75, "the rollout that was given is untouched"


def test_groups_outside_of_the_filter_take_no_part():
    shaped = SRPO(CONFIG, AlgorithmContext()).shape_rewards(rollout())
    assert scores(shaped.rewards)[4:] == [1.5] * 4, "without success: as the simulator paid"
    assert shaped.findings["reward"][4:].isnan().all() and shaped.findings["distance"][4:].isnan().all()
    assert SRPO(CONFIG, AlgorithmContext()).select(shaped).tolist() == [True] * 4 + [False] * 4
    unfiltered = SRPO(attrs.evolve(CONFIG, filter=None), AlgorithmContext())
    shaped = unfiltered.shape_rewards(rollout())
    assert all(0 < score < 0.6 for score in scores(shaped.rewards)[4:]), "the other group's successes count as well"
    assert unfiltered.select(shaped).all()
    truncated = SRPO(attrs.evolve(CONFIG, filter_truncated=True), AlgorithmContext()).shape_rewards(rollout())
    assert torch.equal(truncated.rewards, rollout().rewards)


def test_a_trajectory_without_frames_keeps_its_task_reward():
    blind = rollout()
    blind.features[[0, 1]] = 0.0
    shaped = SRPO(CONFIG, AlgorithmContext()).shape_rewards(blind)
    assert scores(shaped.rewards)[:2] == [1.75, 1.5]
    assert scores(shaped.rewards)[3] == 1.0 and scores(shaped.rewards)[2] == pytest.approx(0.3)
    nothing = SRPO(CONFIG, AlgorithmContext()).shape_rewards(rollout().evolve(features=None))
    assert torch.equal(nothing.rewards, rollout().rewards)


def test_without_a_success_failures_have_no_reward():
    shaped = SRPO(attrs.evolve(CONFIG, filter=None), AlgorithmContext()).shape_rewards(
        rollout(success=[0] * 8, lengths=[6] * 8)
    )
    assert not shaped.rewards.any()


def test_advantages_are_relative_to_the_group_and_tell_of_the_rewards():
    algorithm = SRPO(CONFIG, AlgorithmContext())
    made = algorithm.advantages(algorithm.shape_rewards(rollout()))
    first = made.advantages[0, :4]
    assert first[0] == first[3] > 0 and first[1] != first[2] and first.sum() == pytest.approx(0, abs=1e-5)
    assert made.metrics["srpo/shaped"] == 0.25
    assert 0 < made.metrics["srpo/reward"] < 0.6 and made.metrics["srpo/distance"] > 0
    kept = take_columns(algorithm.shape_rewards(rollout()), np.arange(4))
    assert kept.tasks == ("a",) * 4 and len(kept.findings["reward"]) == 4
    assert algorithm.advantages(kept).metrics["srpo/shaped"] == 0.5


def test_a_rollout_that_names_no_tasks_is_of_one():
    named, nameless = (
        SRPO(CONFIG, AlgorithmContext()).shape_rewards(r) for r in (rollout(), rollout().evolve(tasks=()))
    )
    assert torch.equal(named.rewards, nameless.rewards)


@pytest.mark.parametrize(
    "change",
    [{"clip_low": 0.01}, {"clip_high": 0.01}, {"dual_clip": 1.01}, {"log_prob": "chunk"}, {"entropy_coef": 0.1}],
)
def test_the_keys_of_the_loss_count(change):
    def total(config):
        algorithm = SRPO(config, AlgorithmContext())
        shaped = algorithm.shape_rewards(rollout())
        batch = synthetic.batch(shaped, algorithm.advantages(shaped))
        off = torch.linspace(0.5, 2.0, batch.log_probs.numel()).log()[torch.randperm(batch.log_probs.numel())]
        moved = batch.log_probs + off.reshape(batch.log_probs.shape)
        return float(algorithm.loss(Scores(log_probs=moved, entropy=torch.ones_like(moved)), batch).total)

    torch.manual_seed(0)
    usual = total(CONFIG)
    torch.manual_seed(0)
    assert total(attrs.evolve(CONFIG, **change)) != pytest.approx(usual, abs=1e-6)


def test_the_preset_is_the_published_recipe():
    found = make_component("algorithm", "srpo", preset="siirl-srpo", encoder="tiny", frames=8).config
    assert (found.frames, found.image_size, found.dtype, found.dual_clip) == (8, 384, "float16", None)
    assert (found.aggregation, found.filter, found.kl) == ("trajectory-mean", SuccessFilter(lower=0.1, upper=0.9), None)


def test_the_encoder_is_built_by_its_keys_at_its_first_use():
    config = attrs.evolve(CONFIG, frames=6, image_size=48, dtype="bfloat16")
    algorithm = SRPO(config, AlgorithmContext())
    assert algorithm.encoder is None
    assert algorithm.features((np.zeros((2, 16, 16, 3), np.uint8),) * 2).shape == (2, 48)
    built = algorithm.encoder
    assert (built.frames, built.size, built.dtype) == (6, 48, torch.bfloat16)
    assert algorithm.features((np.zeros((2, 16, 16, 3), np.uint8),)) is not None and algorithm.encoder is built


def test_a_kl_term_needs_the_reference():
    assert SRPO(CONFIG, AlgorithmContext()).needs == Requirements(groups=True, frames=True)
    wanted = Requirements(groups=True, frames=True, reference=True)
    assert SRPO(attrs.evolve(CONFIG, kl=KLSettings(coef=0.1)), AlgorithmContext()).needs == wanted


def test_the_device_is_the_workers_unless_given():
    assert plugin.build(CONFIG, AlgorithmContext(device="cuda:1")).device == "cuda:1"
    assert plugin.build(attrs.evolve(CONFIG, device="cuda:7"), AlgorithmContext(device="cpu")).device == "cuda:7"


@pytest.mark.parametrize("change", [{}, {"filter": None, "dual_clip": 3.0, "aggregation": "step-mean"}])
def test_it_keeps_the_contract(change):
    check_algorithm(plugin, attrs.evolve(CONFIG, frames=4, image_size=32, **change))
    assert SRPOConfig(encoder="tiny").filter == SuccessFilter(lower=0.1, upper=0.9)
