"""Noise levels, conditioners and the sampler, against DIAMOND's numbers and by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from reference_files import reference
from vla_rl.toolkit.world_models import diffusion as D
from vla_rl.toolkit.world_models.unet import UNet


def test_sigmas_are_those_of_diamond():
    cases = json.loads(reference("algorithms", "diamond_sampler.json").read_text())["cases"]
    for case in cases:
        sigmas = D.build_sigmas(case["num_steps"], case["sigma_min"], case["sigma_max"], case["rho"])
        assert sigmas.dtype == torch.float32
        assert sigmas.tolist() == pytest.approx(case["sigmas"]["data"], rel=1e-6)


def test_one_step_is_from_the_largest_level_to_nothing():
    assert D.build_sigmas(1, 2e-3, 5.0, 7).tolist() == pytest.approx([5.0, 0.0])


def test_conditioners_by_hand():
    c = D.compute_conditioners(torch.tensor([0.4]), sigma_data=0.5, sigma_offset_noise=0.3)  # s = 0.5
    assert c.c_in.item() == pytest.approx(1 / math.sqrt(0.5))
    assert c.c_skip.item() == pytest.approx(0.5)
    assert c.c_out.item() == pytest.approx(0.5 * math.sqrt(0.5))
    assert c.c_noise.item() == pytest.approx(math.log(0.5) / 4)
    assert c.c_in.shape == (1, 1, 1, 1) and c.c_noise.shape == (1,)


def test_the_network_target_gives_the_clean_frame_back():
    x = torch.linspace(-0.9, 0.9, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    sigma = torch.tensor([0.05, 4.0])
    draws = torch.Generator().manual_seed(0)
    noisy = D.apply_noise(
        x, sigma, torch.randn(2, 3, 1, 1, generator=draws), torch.randn(x.shape, generator=draws), 0.3
    )
    c = D.compute_conditioners(sigma)
    back = D.wrap_model_output(noisy, D.network_target(x, noisy, c), c)
    assert (back - x).abs().max() < 2 / 255 + 1e-4


def test_predictions_are_cut_to_eight_bits():
    c = D.Conditioners(*(torch.tensor(v).reshape(1, 1, 1, 1) for v in (1.0, 1.0, 0.0)), torch.zeros(1))
    output = torch.tensor([-3.0, -1.0, 0.0, 127.9 / 127.5 - 1, 3.0]).reshape(1, 1, 1, 5)
    levels = (D.wrap_model_output(torch.zeros(1, 1, 1, 5), output, c) + 1) * 127.5
    assert levels.flatten().tolist() == pytest.approx([0, 0, 127, 127, 255], abs=1e-4)


def test_training_levels_are_log_normal_and_clipped():
    levels = D.training_sigmas(torch.tensor([0.0, 1.0, -10.0, 10.0]))
    assert levels.tolist() == pytest.approx([math.exp(-0.4), math.exp(0.8), 2e-3, 20.0])


@pytest.mark.parametrize("order", [1, 2])
def test_the_sampler_ends_at_what_is_denoised(order):
    """The denoisers are one that knows the frame, and one that shrinks by half, computed by hand."""
    x, frame = torch.full((1, 1, 2, 2), 0.8), torch.full((1, 1, 2, 2), 0.25)
    sigmas = D.build_sigmas(3, 2e-3, 5.0, 7)
    assert torch.allclose(D.sample_frames(lambda noisy, sigma: frame, x, sigmas, order), frame)
    seen = []
    half = D.sample_frames(
        lambda noisy, sigma: seen.append(float(sigma)) or noisy / 2, x, torch.tensor([2.0, 1.0, 0.0]), order
    )
    # Euler: slope .2, to .6; then slope .3, to .3. Heun: at .6 the slope is .3, so to .55; then slope .275, to .275.
    assert half[0, 0, 0, 0].item() == pytest.approx(0.3 if order == 1 else 0.275)
    assert seen == ([2.0, 1.0] if order == 1 else [2.0, 1.0, 1.0])


def test_the_unet_keeps_any_size_and_heeds_its_condition_once_it_is_trained():
    net = UNet((8, 16, 24), (1, 2, 1), condition=12)
    x, condition = torch.randn(2, 8, 9, 14), torch.randn(2, 12)
    assert net(x, condition).shape == x.shape
    assert torch.equal(net(x, condition), net(x, condition + 1)), "what is added by blocks is nothing at first"
    for block in net.middle:
        torch.nn.init.ones_(block.conv2.weight)
    assert not torch.equal(net(x, condition), net(x, condition + 1))
