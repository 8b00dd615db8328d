from __future__ import annotations

import attrs
import pytest
import torch

from vla_rl.core.types import Rollout
from vla_rl.plugins.algorithms.ppo import plugin
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.plugins.algorithms.ppo.impl import PPO
from vla_rl.testing import check_algorithm
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled, Truncated, VTrace


def rollout(values: torch.Tensor) -> Rollout:
    """One row, two chunk steps of two actions: an episode ends by success with action 1, the next one is cut."""
    return Rollout(
        step=1,
        rewards=torch.tensor([[[1.0, 0.0]], [[0.0, 0.5]]]),
        terminated=torch.tensor([[[True, False]], [[False, False]]]),
        truncated=torch.zeros(2, 1, 2, dtype=torch.bool),
        valid=torch.tensor([[[True, False]], [[True, True]]]),
        log_probs=torch.zeros(2, 1, 2, 3),
        values=values,
        next_values=torch.tensor([[0.0], [4.0]]),
        groups=torch.zeros(1, dtype=torch.long),
        success=torch.tensor([True]),
        versions=torch.zeros(2, 1, dtype=torch.long),
        episodes=(),
    )


def test_chunk_level_by_hand():
    config = PPOConfig(gamma=0.5, lam=1.0, normalize_advantages=None)
    result = PPO(config).advantages(rollout(torch.tensor([[0.25], [1.0]])))
    assert result.advantages.flatten().tolist() == pytest.approx([1.0 - 0.25, 0.5 + 0.5 * 4.0 - 1.0])
    assert result.returns.flatten().tolist() == pytest.approx([1.0, 2.5])


def test_action_level_by_hand():
    config = PPOConfig(gamma=0.5, lam=0.0, normalize_advantages=None, advantage="action")
    result = PPO(config).advantages(rollout(torch.tensor([[[0.25, 9.0]], [[1.0, 2.0]]])))
    # action 0: 1 - 0.25 (terminated); action 1 was dropped; 2: 0 + 0.5 * 2 - 1; 3: 0.5 + 0.5 * 4 - 2
    assert result.advantages.flatten().tolist() == pytest.approx([0.75, 0.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("aggregation", "weights", "counts"),
    [
        ("step-mean", [1, 0, 1, 1], [1, 0, 1, 1]),
        ("trajectory-mean", [1, 0, 0.5, 0.5], [1, 0, 0.5, 0.5]),  # episodes of one and of two actions
        ("rlinf", [4, 0, 2, 2], [4 / 3, 0, 4 / 3, 4 / 3]),
    ],
)
def test_the_aggregation_weighs_the_critics_entries_too(aggregation, weights, counts):
    config = PPOConfig(advantage="action", aggregation=aggregation)
    result = PPO(config).advantages(rollout(torch.zeros(2, 1, 2)))
    assert result.value_weights.flatten().tolist() == pytest.approx(weights)
    assert result.value_counts.flatten().tolist() == pytest.approx(counts)


def test_normalised_advantages_have_zero_mean_over_valid_entries():
    result = PPO(PPOConfig(advantage="action")).advantages(rollout(torch.rand(2, 1, 2)))
    valid = torch.tensor([[[True, False]], [[True, True]]])
    assert float(result.advantages[valid].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(result.advantages[valid].std()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("log_prob", "advantage"),
    [("chunk", "chunk"), ("action", "chunk"), ("token", "chunk"), ("action", "action"), ("token", "action")],
)
def test_it_keeps_the_contract(log_prob, advantage):
    check_algorithm(plugin, PPOConfig(log_prob=log_prob, advantage=advantage, entropy_coef=0.01, dual_clip=3.0))


def test_an_advantage_of_each_action_needs_a_finer_ratio():
    with pytest.raises(ValueError, match="advantage: action cannot be used with log_prob: chunk"):
        PPOConfig(advantage="action", log_prob="chunk")


def test_always_bootstraps_an_episode_that_terminated_too():
    """RLinf adds gamma V(final observation) to the last reward of every finished episode (env_worker.py:744)."""
    config = PPOConfig(gamma=0.5, lam=1.0, normalize_advantages=None, time_limit="always")
    succeeded = attrs.evolve(
        rollout(torch.tensor([[0.25], [1.0]])),
        terminated=torch.tensor([[[True, False]], [[False, False]]]),
        next_values=torch.tensor([[4.0], [0.0]]),
    )
    assert float(PPO(config).advantages(succeeded).advantages[0, 0]) == pytest.approx(1.0 + 0.5 * 4.0 - 0.25)
    assert PPO(config).needs.terminal_values and not PPO(PPOConfig()).needs.terminal_values


@pytest.mark.parametrize(("time_limit", "advantage"), [("bootstrap", 1.0 + 0.5 * 4.0 - 0.25), ("terminal", 1.0 - 0.25)])
def test_a_time_limit_is_bootstrapped_or_an_end(time_limit, advantage):
    cut = attrs.evolve(
        rollout(torch.tensor([[0.25], [1.0]])),
        terminated=torch.zeros(2, 1, 2, dtype=torch.bool),
        truncated=torch.tensor([[[True, False]], [[False, False]]]),
        next_values=torch.tensor([[4.0], [0.0]]),
    )
    config = PPOConfig(gamma=0.5, lam=1.0, normalize_advantages=None, time_limit=time_limit)
    assert float(PPO(config).advantages(cut).advantages[0, 0]) == pytest.approx(advantage)


@pytest.mark.parametrize("log_prob", ["chunk", "action", "token"])
@pytest.mark.parametrize(
    "keys",
    [
        {"correction": Decoupled(threshold=2.0)},
        {"correction": Decoupled(proximal="interpolate")},
        {"correction": Truncated()},
        {"correction": VTrace()},
        {"correction": VTrace(), "advantage": "action"},
    ],
)
def test_it_keeps_the_contract_with_old_data(keys, log_prob):
    if "advantage" in keys and log_prob == "chunk":
        return
    check_algorithm(plugin, PPOConfig(log_prob=log_prob, **keys))
