"""Real-time chunking against the paper's Algorithm 1 written plainly, and on a flow whose velocity is known."""

from __future__ import annotations

import math

import pytest
import torch

from vla_rl.toolkit.models.flow.real_time import guidance_weights, guide_velocity


@pytest.mark.parametrize(("left", "delay"), [(6, 2), (8, 0), (5, 5), (1, 1), (10, 3)])
def test_weights_are_those_of_equation_5(left, delay):
    horizon = 10
    found = guidance_weights(left, delay, horizon)
    for i in range(horizon):
        c = (left - i) / (left - delay + 1)
        wanted = 1.0 if i < delay else c * (math.exp(c) - 1) / (math.e - 1) if i < left else 0.0
        assert math.isclose(found[i], wanted, abs_tol=1e-6)


def plain(network, x, tau, last, weights, limit):
    """The velocity of Algorithm 1 for one row, x [n], from noise (tau = 0) to actions; the Jacobian by differences."""

    def clean(x):
        return x + (1 - tau) * network(x)

    step = 1e-6
    unit = torch.eye(len(x), dtype=x.dtype) * step
    jacobian = torch.stack([(clean(x + e) - clean(x - e)) / (2 * step) for e in unit], dim=1)
    pull = ((last - clean(x)) * weights) @ jacobian
    r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
    strength = limit if tau == 0 else min(limit, (1 - tau) / (tau * r2))
    return network(x) + strength * pull


@pytest.mark.parametrize("tau", [0.0, 0.25, 0.9])
def test_guidance_is_that_of_algorithm_1(tau):
    random = torch.Generator().manual_seed(0)
    one, two = (torch.randn(6, 6, generator=random, dtype=torch.float64) for _ in range(2))

    def network(x):
        return torch.tanh(x @ one) @ two

    x, last = (torch.randn(3, 6, generator=random, dtype=torch.float64) for _ in range(2))
    weights = torch.tensor([1.0, 1.0, 0.6, 0.2, 0.0, 0.0], dtype=torch.float64)
    found = guide_velocity(
        lambda x: -network(x.flatten(1)).view(3, 3, 2),
        x.view(3, 3, 2),
        torch.full((3,), 1 - tau, dtype=torch.float64),
        last.view(3, 3, 2),
        weights.view(3, 2).expand(3, 3, 2),
    )
    for row in range(3):
        wanted = -plain(network, x[row], tau, last[row], weights, 5.0)
        torch.testing.assert_close(found[row].flatten(), wanted, rtol=1e-6, atol=1e-6)


def test_a_chunk_continues_the_last_one():
    """Smooth trajectories, whose velocity is known: the new chunk repeats what is executed meanwhile, and has no jump
    behind it; a chunk that is not guided is another trajectory."""
    horizon, steps, left, delay = 16, 10, 10, 4
    index = torch.arange(horizon, dtype=torch.float64)
    covariance = torch.exp(-0.5 * ((index[:, None] - index) / 5) ** 2) + 1e-4 * torch.eye(horizon, dtype=torch.float64)
    eye = torch.eye(horizon, dtype=torch.float64)

    def velocity(x, t):
        noisy = t**2 * eye + (1 - t) ** 2 * covariance
        return (x[..., 0] @ torch.linalg.solve(noisy, t * eye - (1 - t) * covariance))[..., None]

    random = torch.Generator().manual_seed(1)
    rows = 64
    root = torch.linalg.cholesky(covariance)
    last = (torch.randn(rows, horizon, generator=random, dtype=torch.float64) @ root.T)[..., None]
    start = torch.randn(rows, horizon, 1, generator=random, dtype=torch.float64)
    chunks = {}
    for name, weights in (("guided", guidance_weights(left, delay, horizon)), ("free", torch.zeros(horizon))):
        x = start
        for i in range(steps):
            t = 1 - i / steps
            time = torch.full((rows,), t, dtype=torch.float64)
            x = x - guide_velocity(lambda x, t=t: velocity(x, t), x, time, last, weights.double()[:, None]) / steps
        chunks[name] = x
    off = {name: (x - last)[:, :delay].abs().mean() for name, x in chunks.items()}
    assert off["guided"] < 0.1 * off["free"]
    jump = (chunks["guided"][:, delay] - chunks["guided"][:, delay - 1]).abs().mean()
    assert jump < 1.5 * (last[:, delay] - last[:, delay - 1]).abs().mean()
    end = (chunks["guided"] - last)[:, -1].abs().mean()
    assert end > 0.3, "what follows the last chunk is free"
