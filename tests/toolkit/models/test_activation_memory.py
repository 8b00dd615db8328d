"""Bytes of activations: counted by storage, with and without recomputation, on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from activation_memory import saved_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counts_what_the_backward_pass_needs_and_no_parameter(device: str) -> None:
    layer = nn.Linear(16, 32, device=device)
    x = torch.ones(4, 16, device=device)
    assert saved_bytes(lambda: layer(x)) == 4 * 32 * 4  # the result; x and the weight were there
    assert saved_bytes(lambda: layer(x).exp()) == 4 * 32 * 4  # exp saves its result, and frees its input
    assert saved_bytes(lambda: layer(x).sin()) == 2 * 4 * 32 * 4  # sin saves its input


def test_shared_storages_count_once() -> None:
    x = torch.ones(4, 16, requires_grad=True)

    def forward() -> Tensor:
        y = x * 2
        return (y.view(8, 8) * y.view(64).view(8, 8)).sum() + y.T.sin().sum()

    assert saved_bytes(forward) == 4 * 64 + 4  # y; the products are not needed; one number


def test_without_gradient_the_result_is_left() -> None:
    x = torch.ones(4, 16, requires_grad=True)
    with torch.no_grad():
        assert saved_bytes(lambda: x.sin().sin().sin()) == 4 * 64


def test_recomputation_keeps_inputs_only() -> None:
    x = torch.ones(4, 16, device="meta", requires_grad=True)

    def block(y: Tensor) -> Tensor:
        return y.sin().sin().sin()

    plain = saved_bytes(lambda: block(block(x)))
    recomputed = saved_bytes(lambda: checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False))
    assert plain == 6 * 4 * 64  # five results that are read again, and the last
    assert recomputed == 2 * 4 * 64  # the input of the second block, and the last result
