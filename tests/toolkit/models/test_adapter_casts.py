"""Adapters that are cast once: the same gradients to the last bit, with fewer casts."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vla_rl.core.contexts import ModelContext
from vla_rl.core.randomness import Noise
from vla_rl.plugins.models.openvla import openvla_oft
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.recompute import RECOMPUTE
from vla_rl.toolkit.trainers.trained_model import adapters_cast_once

ENV = synthetic.env_info(cameras=1)
PASSES = 2


class Casts(TorchDispatchMode):
    """Mode that counts casts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "_foreach_copy_"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def step(recompute: str, once: bool, **config: Any) -> tuple[dict[str, torch.Tensor], Counter[str], int]:
    """Return gradients of two passes, the numbers of casts, and the number of adapters' weights."""
    keys = {"preset": "tiny", "lora": LoRAConfig(rank=4), "recompute": recompute, **config}
    policy = openvla_oft.build(OpenVLAOFTConfig(**keys), ModelContext(env=ENV, chunk=2, values="chunk"))
    parameters = dict(policy.module.named_parameters())
    for name, parameter in parameters.items():
        if "lora_B" in name:  # it starts at 0, where other adapters' gradients are 0 too
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    obs = synthetic.observation(ENV, 4)
    chunk = policy.sample_chunk(obs, Noise(0, "test", range(4), [0] * 4, [0] * 4), False)
    with Casts() as casts, adapters_cast_once(policy.module) if once else nullcontext():
        for weight in range(1, PASSES + 1):
            scores = policy.chunk_log_probs(obs, chunk)
            ((scores.log_probs * weight).sum() + scores.values.sum()).backward()
    assert dict(policy.module.named_parameters()).keys() == parameters.keys()
    assert not any("weight" in vars(part) for part in policy.module.modules())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return gradients, casts.counts, sum("lora_" in name for name in gradients)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_gradients_stay_and_casts_go(recompute: str) -> None:
    keys = {"dtype": "bfloat16", "autocast": True}
    plain, before, adapters = step(recompute, once=False, **keys)
    cast, after, _ = step(recompute, once=True, **keys)
    assert adapters > 50 and plain.keys() == cast.keys()
    assert all(gradient.dtype == torch.float32 for name, gradient in cast.items() if "lora_" in name)
    assert all(torch.equal(gradient, cast[name]) for name, gradient in plain.items())
    assert after["_foreach_copy_"] == 1 + PASSES  # weights, and gradients of each pass
    assert before["_to_copy"] - after["_to_copy"] >= 2 * PASSES * adapters


def test_without_autocast_nothing_is_cast() -> None:
    plain, _, _ = step("off", once=False)
    cast, counts, _ = step("off", once=True)
    assert counts["_foreach_copy_"] == 0
    assert all(torch.equal(gradient, cast[name]) for name, gradient in plain.items())


def test_a_weight_without_gradient_stays_without_one() -> None:
    keys = {"preset": "tiny", "lora": LoRAConfig(rank=4), "dtype": "bfloat16", "autocast": True}
    policy = openvla_oft.build(OpenVLAOFTConfig(**keys), ModelContext(env=ENV, chunk=2))
    layer = policy.module.vla.get_base_model().language_model.model.layers[0].mlp.up_proj
    with adapters_cast_once(policy.module), torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, 64)).sum().backward()
    with_gradient = {name for name, p in policy.module.named_parameters() if p.grad is not None}
    assert len(with_gradient) == 2 and all("layers.0.mlp.up_proj.lora_" in name for name in with_gradient)
