"""What the tests of SmolVLA and GR00T share: both denoise with a language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_cases import changed, noise

from vla_rl.core.types import Observation
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.flow.config import FlowNoise, FlowSDE, PrefixHeadConfig

contracts = pytest.mark.parametrize(
    ("values", "config"),
    [
        ("none", {"noise": FlowNoise(), "cameras": ("camera1",), "train_expert_only": False}),
        ("action", {"noise": FlowSDE(steps="all", level=0.3), "value_head": PrefixHeadConfig(reads="expert")}),
        ("chunk", {"use_state": False, "lora": LoRAConfig(rank=4), "value_head": PrefixHeadConfig(detach=True)}),
    ],
)
"""Settings that between them reach every branch."""


def denoised(model: Any, obs: Observation) -> torch.Tensor:
    """The likeliest actions, before they are scaled."""
    rows = len(obs)
    found: torch.Tensor = model.sample_chunk(obs, noise(rows), True).extras["chain"][:, -1]
    return found


def check_inputs(model: Any, obs: Observation) -> None:
    """Each of them matters."""
    base = denoised(model, obs)
    for other in changed(obs):
        assert (denoised(model, other) - base).abs().max() > 1e-5


def check_narrow(model: Any, full: Any, obs: Observation) -> None:
    """A policy in bfloat16 scores what it sampled, can be trained, and is near the one in float32."""
    chunk = model.sample_chunk(obs, noise(4), False)
    scores = model.chunk_log_probs(obs, chunk)
    assert torch.equal(scores.log_probs, chunk.log_probs)
    (scores.log_probs.sum() + scores.values.sum() + model.imitation_loss(obs, chunk.actions)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.module.parameters() if p.requires_grad)
    chain = full.sample_chunk(obs, noise(4), True).extras["chain"]
    torch.testing.assert_close(model.sample_chunk(obs, noise(4), True).extras["chain"], chain, rtol=0, atol=0.05)
