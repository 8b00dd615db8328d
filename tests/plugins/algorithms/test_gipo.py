from __future__ import annotations

import math

import attrs
import pytest
import torch
from algorithm_cases import rollout_of

from vla_rl.core.types import Scores
from vla_rl.plugins.algorithms.gipo import plugin
from vla_rl.plugins.algorithms.gipo.config import GIPOConfig
from vla_rl.plugins.algorithms.gipo.impl import GIPO
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.plugins.algorithms.ppo.impl import PPO
from vla_rl.testing import check_algorithm, synthetic


def batch_at(algorithm, shift, chunk_steps=3):
    """A batch, and scores whose log-probs are those of the rollout plus `shift`, with a leaf for the gradient."""
    rollout = synthetic.rollout(values="chunk", chunk_steps=chunk_steps)
    batch = synthetic.batch(rollout, algorithm.advantages(rollout))
    new = (batch.log_probs + shift).requires_grad_()
    return Scores(log_probs=new, entropy=torch.zeros(new.shape), values=batch.values), batch, new


@pytest.mark.parametrize(
    ("log_prob", "advantage"),
    [("chunk", "chunk"), ("action", "chunk"), ("token", "chunk"), ("action", "action"), ("token", "action")],
)
def test_it_keeps_the_contract(log_prob, advantage):
    check_algorithm(
        plugin, GIPOConfig(log_prob=log_prob, advantage=advantage, entropy_coef=0.01, behaviour_kl_coef=0.1)
    )


def test_at_the_old_policy_it_is_the_policy_gradient_of_ppo():
    gradients = []
    for algorithm in (GIPO(GIPOConfig(value_coef=0)), PPO(PPOConfig(value_coef=0, normalize_advantages="population"))):
        scores, batch, new = batch_at(algorithm, 0.0)
        algorithm.loss(scores, batch).total.backward()
        gradients.append(new.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("config", [GIPOConfig(), *(GIPOConfig(**keys) for keys in plugin.presets.values())])
def test_advantages_have_the_std_of_accerls_equations(config):
    """13 steps whose advantages are 0 ... 12: the mean is 6 and, by AcceRL's eq. 5-6, S = 78, Q = 650 and N = 13 give
    the variance 650 / 13 - 36 = 14; ours of n - 1 would be 182 / 12. PPO's is the latter, as RLinf's and siiRL's."""
    rewards = torch.arange(13.0)[None, :, None]  # one step each, which ends its episode
    none = torch.zeros(1, 13)
    rollout = rollout_of(rewards, torch.ones(1, 13, 1, dtype=torch.bool), values=none, next_values=none)
    first = {PPO(PPOConfig()): -1.5406577, GIPO(config): -1.6035675}
    for algorithm, wanted in first.items():
        advantages = algorithm.advantages(rollout).advantages[0]
        assert float(advantages[0]) == pytest.approx(wanted, rel=1e-6)
        assert float(advantages[12]) == pytest.approx(-wanted, rel=1e-6)
        assert float(advantages[6]) == pytest.approx(0.0, abs=1e-6)


def test_far_from_it_the_gradient_fades_where_ppo_has_none():
    """r = e^0.5: PPO clips every entry with A > 0; GIPO keeps r A w with w = exp(-1/2) (sigma 0.5)."""
    algorithm = GIPO(GIPOConfig(value_coef=0))
    scores, batch, new = batch_at(algorithm, 0.5)
    loss = algorithm.loss(scores, batch)
    loss.total.backward()
    entries = batch.valid[..., None].expand(new.shape)
    wanted = (
        -(batch.weights / 2 * batch.advantages[:, None])[..., None].expand(new.shape) * math.exp(0.5) * math.exp(-0.5)
    )
    torch.testing.assert_close(new.grad[entries], wanted[entries])
    clipped = loss.statistics["loss/clip_fraction"].read("c")["c"]
    assert clipped == pytest.approx(float((wanted[entries] < 0).float().mean()))
    assert loss.statistics["policy/dead_gradients"].read("d")["d"] == 0.0
    plain = PPO(PPOConfig(value_coef=0))
    scores, batch, new = batch_at(plain, 0.5)
    plain.loss(scores, batch).total.backward()
    assert not new.grad[(wanted < 0) & entries].any()


def test_very_old_samples_count_as_dead():
    algorithm = GIPO(GIPOConfig())
    scores, batch, _ = batch_at(algorithm, 2.0)  # w = exp(-8)
    loss = algorithm.loss(scores, batch)
    assert loss.statistics["policy/dead_gradients"].read("d") == {"d": 1.0}
    assert torch.isfinite(loss.total)


def test_the_lag_of_a_batch_is_reported():
    algorithm = GIPO(GIPOConfig())
    scores, batch, _ = batch_at(algorithm, 0.0)
    lag = torch.arange(len(batch.lag))
    loss = algorithm.loss(scores, attrs.evolve(batch, lag=lag))
    assert loss.statistics["policy/lag_mean"].read("m") == {"m": pytest.approx(float(lag.float().mean()))}
    assert float(loss.maxima["policy/lag_max"]) == len(lag) - 1


def test_divergence_from_the_behaviour_pulls_back():
    """The gradient of k3 is (r - 1): against the shift, 0 at the old policy."""
    for shift, sign in ((0.3, 1), (-0.3, -1), (0.0, 0)):
        totals = []
        for coef in (0.0, 1.0):
            algorithm = GIPO(GIPOConfig(value_coef=0, behaviour_kl_coef=coef))
            scores, batch, new = batch_at(algorithm, shift)
            algorithm.loss(scores, batch).total.backward()
            totals.append(float(new.grad.sum()))
        assert (
            math.copysign(1, totals[1] - totals[0]) == sign if sign else totals[1] == pytest.approx(totals[0], abs=1e-7)
        )
