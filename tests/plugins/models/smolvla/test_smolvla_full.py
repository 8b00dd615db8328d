"""SmolVLA at its public size, with random weights: it acts and takes a learner step in little memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, resource
import torch
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.smolvla import plugin
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.toolkit.trainers.optimizer import build_optimizer
from vla_rl.testing import synthetic

torch.set_num_threads(1)
env = synthetic.env_info(cameras=1, pixels=256, state_dim=8, action_dim=7, bounds=((-1.0, 1.0),))
model = plugin.build(SmolVLAConfig(preset="full", denoise_steps=2), ModelContext(env=env, chunk=10, values="chunk"))
network, obs = model.module.network, synthetic.observation(env, 1)
chunk = model.sample_chunk(obs, Noise(0, "full", [0], [0], [0]), False)
trained = [p for p in model.module.parameters() if p.requires_grad]
optimizer = build_optimizer(trained, [], TrainSpec(steps=1, lr=1e-4, micro_batch=1))
before = network.action_out_proj.weight.detach().clone()
scores = model.chunk_log_probs(obs, chunk)
(scores.values.square().mean() - scores.log_probs.sum()).backward()
optimizer.step()
print(json.dumps({
    "weights": sum(p.numel() for p in network.parameters()),
    "same": bool(torch.equal(scores.log_probs, chunk.log_probs)),
    "moved": float((network.action_out_proj.weight - before).abs().max()),
    "finite": all(bool(p.isfinite().all()) for p in trained),
    "chunk": list(chunk.actions.shape),
    "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in other units elsewhere")
def test_the_public_size_acts_and_learns_within_six_gigabytes() -> None:
    """In a separate process, whose peak is that of this model alone."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] == 450_046_176 and found["chunk"] == [1, 10, 7]
    assert found["same"] and found["finite"] and found["moved"] > 1e-6
    assert 1.7 < found["gib"] < 6, found
