from __future__ import annotations

import attrs
import pytest
import torch

from vla_rl.core.types import Rollout
from vla_rl.plugins.algorithms.grpo import plugin
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig
from vla_rl.plugins.algorithms.grpo.impl import GRPO
from vla_rl.testing import check_algorithm
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled, Truncated
from vla_rl.toolkit.algorithms.policy_gradient import SuccessFilter as Filter

# three chunk steps of two actions; groups {0, 1}, {2, 3}, {4, 5}
LENGTHS = (1, 6, 3, 3, 6, 6)
REWARDS = (1.0, 0.0, 1.0, 1.0, 0.0, 0.0)


def rollout() -> Rollout:
    valid = torch.zeros(6, 6, dtype=torch.bool)  # [N, S]
    for n, length in enumerate(LENGTHS):
        valid[n, :length] = True
    ends = torch.zeros_like(valid)
    ends[torch.arange(6), torch.tensor(LENGTHS) - 1] = True
    won = torch.tensor(REWARDS) > 0
    rewards = (ends & won[:, None]).float()

    def shape(flat: torch.Tensor) -> torch.Tensor:
        return flat.reshape(6, 3, 2).permute(1, 0, 2)

    return Rollout(
        step=1,
        rewards=shape(rewards),
        terminated=shape(ends & won[:, None]),
        truncated=shape(ends & ~won[:, None]),
        valid=shape(valid),
        log_probs=torch.zeros(3, 6, 2, 1),
        values=None,
        next_values=None,
        groups=torch.tensor([0, 0, 1, 1, 2, 2]),
        success=won,
        versions=torch.zeros(3, 6, dtype=torch.long),
        episodes=(),
    )


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (GRPOConfig(), [True, True, False, False, False, False]),
        (GRPOConfig(filter_identical=False), [True] * 6),
        (GRPOConfig(filter_identical=False, filter=Filter()), [True, True, False, False, False, False]),
        (GRPOConfig(filter_identical=False, filter=Filter(lower=0.0)), [True, True, False, False, True, True]),
        (GRPOConfig(filter_identical=False, filter_truncated=True), [False, False, True, True, False, False]),
    ],
)
def test_filters_drop_whole_groups(config, kept):
    assert GRPO(config).select(rollout()).tolist() == kept


def test_advantages_are_one_number_a_trajectory_and_zero_after_the_end():
    result = GRPO(GRPOConfig()).advantages(rollout())
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert result.advantages[:, 0].tolist() == pytest.approx([half, 0.0, 0.0])
    assert result.advantages[:, 1].tolist() == pytest.approx([-half] * 3)
    assert not result.advantages[:, 2:].any()


def test_trajectory_mean_weighs_every_trajectory_alike():
    weights = GRPO(GRPOConfig()).advantages(rollout()).weights
    assert weights.sum((0, 2)).tolist() == pytest.approx([1.0] * 6)
    steps = GRPO(GRPOConfig(aggregation="step-mean")).advantages(rollout()).weights
    assert steps.sum((0, 2)).tolist() == list(LENGTHS)
    chunks = GRPO(GRPOConfig(aggregation="step-mean", log_prob="chunk")).advantages(rollout()).weights
    assert chunks.shape == (3, 6) and chunks.sum(0).tolist() == [1, 3, 2, 2, 3, 3]


@pytest.mark.parametrize("log_prob", ["token", "action", "chunk"])
@pytest.mark.parametrize("aggregation", ["trajectory-mean", "step-mean", "rlinf"])
def test_it_keeps_the_contract(log_prob, aggregation):
    config = GRPOConfig(log_prob=log_prob, aggregation=aggregation, entropy_coef=0.01, dual_clip=3.0)
    check_algorithm(plugin, attrs.evolve(config, filter=Filter(lower=0.0, upper=1.0)))


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"filter.lower \(0.8\) is above filter.upper \(0.2\)"):
        Filter(lower=0.8, upper=0.2)


@pytest.mark.parametrize("log_prob", ["chunk", "action", "token"])
@pytest.mark.parametrize(
    "keys",
    [
        {"correction": Decoupled(threshold=2.0)},
        {"correction": Decoupled(proximal="interpolate")},
        {"correction": Truncated()},
    ],
)
def test_it_keeps_the_contract_with_old_data(keys, log_prob):
    check_algorithm(plugin, GRPOConfig(log_prob=log_prob, **keys))
