"""Categorical distributions, worked by hand."""

from __future__ import annotations

import pytest
import torch

from vla_rl.toolkit.models.tokens import categorical_entropy, choose_bins, inverse_cdf, median_bins


def test_inverse_cdf_by_hand() -> None:
    log_probs = torch.tensor([0.0, 0.25, 0.25, 0.0, 0.5, 0.0]).log().expand(7, 6)
    uniforms = torch.tensor([0.0, 0.24, 0.25, 0.49, 0.5, 0.75, 0.99999994])
    assert inverse_cdf(log_probs, uniforms).tolist() == [1, 1, 2, 2, 4, 4, 4]


def test_the_mode_or_a_draw() -> None:
    log_probs = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert choose_bins(log_probs, None).tolist() == [1]
    assert choose_bins(log_probs, torch.tensor([0.1])).tolist() == [0]


def test_the_median_is_not_the_mode() -> None:
    log_probs = torch.tensor([[0.35, 0.1, 0.3, 0.25], [0.2, 0.35, 0.05, 0.4], [0.0, 0.0, 0.0, 1.0]]).log()
    assert median_bins(log_probs).tolist() == [2, 1, 3]
    assert choose_bins(log_probs, None).tolist() == [0, 3, 3]


def test_entropy_in_nats() -> None:
    assert categorical_entropy(torch.tensor([0.5, 0.5]).log()).item() == pytest.approx(0.6931472)
