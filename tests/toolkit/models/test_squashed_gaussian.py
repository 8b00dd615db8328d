"""The squashed Gaussian against sums over a fine grid and PyTorch's transformed distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from vla_rl.toolkit.models.squashed_gaussian import LOG_STD, SquashedGaussian, log_slope

MEANS = torch.tensor([0.0, 0.3, -1.7, 4.0])


@pytest.mark.parametrize("log_std", [-5.0, -1.5, 0.0, 2.0])
def test_log_prob_is_that_of_the_transformed_normal(log_std: float) -> None:
    ours = SquashedGaussian(MEANS.double(), torch.full((4,), log_std).double())
    theirs = TransformedDistribution(Normal(MEANS.double(), math.exp(log_std)), TanhTransform())
    unsquashed = ours.sample(torch.tensor([0.5, -1.0, 2.0, -0.2]).double())
    kept = unsquashed.abs() < 8  # tanh of larger numbers rounds to 1, from which PyTorch cannot return
    assert kept.any()
    expected = theirs.log_prob(torch.tanh(unsquashed.clamp(-8, 8)))
    torch.testing.assert_close(ours.log_prob(unsquashed)[kept], expected[kept], rtol=1e-6, atol=1e-6)


def test_log_slope_stays_finite_far_out() -> None:
    far = torch.tensor([-60.0, 60.0])
    torch.testing.assert_close(log_slope(far), 2 * math.log(2) - 2 * far.abs())
    near = torch.tensor([-1.0, 0.0, 2.0]).double()
    torch.testing.assert_close(log_slope(near), (1 - torch.tanh(near) ** 2).log())


@pytest.mark.parametrize("log_std", [-5.0, -1.5, 0.0, 1.0, 2.0])
def test_entropy_is_the_mean_of_minus_log_prob(log_std: float) -> None:
    distribution = SquashedGaussian(MEANS, torch.full((4,), log_std))
    z = torch.linspace(-9, 9, 20_001)
    shares = torch.softmax(-0.5 * z.square().double(), 0)
    u = MEANS.double() + math.exp(log_std) * z.double()[:, None]
    exact = SquashedGaussian(MEANS.double(), torch.full((4,), log_std).double())
    expected = -(exact.log_prob(u) * shares[:, None]).sum(0)
    torch.testing.assert_close(distribution.entropy().double(), expected, rtol=0, atol=0.03 if log_std > 0 else 1e-3)


def test_samples_have_a_gradient_and_no_noise_is_the_mean() -> None:
    outputs = torch.zeros(3, 2, requires_grad=True)
    distribution = SquashedGaussian.of_outputs(outputs)
    assert torch.equal(distribution.sample(None), distribution.mean)
    distribution.sample(torch.tensor([1.0, 2.0, -1.0])).sum().backward()
    assert outputs.grad is not None
    middle = sum(LOG_STD) / 2
    slope = (LOG_STD[1] - LOG_STD[0]) / 2 * math.exp(middle)  # of exp(log_std) where tanh has slope 1
    torch.testing.assert_close(outputs.grad[:, 0], torch.ones(3))
    torch.testing.assert_close(outputs.grad[:, 1], slope * torch.tensor([1.0, 2.0, -1.0]))


def test_temperature_multiplies_deviations() -> None:
    outputs = torch.tensor([[0.1, 0.4]])
    cold, hot = (SquashedGaussian.of_outputs(outputs, temperature) for temperature in (1.0, 3.0))
    torch.testing.assert_close(hot.log_std.exp(), 3 * cold.log_std.exp())
    assert torch.equal(hot.mean, cold.mean)
