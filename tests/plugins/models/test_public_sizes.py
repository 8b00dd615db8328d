"""Presets of public sizes: their weights, built and run on the meta device without memory."""

from __future__ import annotations

import pytest
import torch

from vla_rl.core.contexts import ModelContext
from vla_rl.core.randomness import Noise
from vla_rl.plugins.models.gr00t import plugin as gr00t
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.openvla import openvla, openvla_oft
from vla_rl.plugins.models.openvla.config import OpenVLAARConfig, OpenVLAOFTConfig
from vla_rl.plugins.models.pi0 import pi05
from vla_rl.plugins.models.pi0 import plugin as pi0
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config
from vla_rl.plugins.models.smolvla import plugin as smolvla
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.runtime.gpu_memory.model_memory import LiveMemory, meta_observation
from vla_rl.testing import synthetic
from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.meta_device import CudaSemantics


@pytest.mark.parametrize(
    ("plugin", "config", "billions", "width"),
    [
        (openvla_oft, OpenVLAOFTConfig(preset="full"), 7.41, None),  # without rows of the head for text
        (openvla, OpenVLAARConfig(preset="full"), 7.41, None),
        (pi0, Pi0Config(preset="full"), 3.50, 32),
        (pi05, Pi05Config(preset="full"), 3.62, 32),
        (smolvla, SmolVLAConfig(preset="full"), 0.45, 32),
        (gr00t, GrootConfig(preset="full"), 2.41, 32),
        (gr00t, GrootConfig(preset="full_n1_7"), 3.13, 32),
    ],
)
def test_public_sizes_act_and_learn_on_the_meta_device(plugin, config, billions, width):
    info = synthetic.env_info(cameras=1, pixels=224, state_dim=0, action_dim=7)
    with CudaSemantics(), LiveMemory() as memory:
        model = plugin.build(config, ModelContext(env=info, chunk=2, device="meta"))
        weights = sum(p.numel() for p in model.module.parameters())
        assert weights / 1e9 == pytest.approx(billions, abs=0.006)
        assert memory.now >= 4 * weights, "and this many bytes would be alive"
        if width is not None:
            assert model.module.shape[1] == width, "numbers of an action, padding included"
        obs = meta_observation(info, 2)
        chunk = model.sample_chunk(obs, Noise(0, "sizes", [0, 1], [0, 0], [0, 0]), False)
        assert chunk.actions.shape == (2, 2, 7)
        scores = model.chunk_log_probs(obs, chunk)
        (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert all(p.is_meta for p in model.module.parameters())
    assert any(p.grad is not None for p in model.module.parameters())


def test_random_weights_of_a_large_network_are_drawn_on_its_device(monkeypatch):
    """On a CPU, where both are the same, the limit changes nothing; on the meta device nothing is drawn."""

    def weights():
        layer = torch.nn.Linear(64, 64)
        networks.initialise_network(layer, 3, "last", lambda name, module, normal: None)
        return layer.weight.detach()

    small = weights()
    devices = []
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: devices.append(device) or generator(device))
    monkeypatch.setattr(networks, "DRAWN_ON_DEVICE", 1000)
    assert torch.equal(weights(), small) and devices == [torch.device("cpu")]
    hollow = torch.nn.Linear(64, 64, device="meta")
    networks.initialise_network(hollow, 3, "last", lambda name, module, normal: None)
    assert hollow.weight.is_meta
