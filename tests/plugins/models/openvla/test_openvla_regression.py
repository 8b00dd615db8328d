"""The L1 head: the original's numbers, evaluation and imitation; RL is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import noise
from openvla_cases import CHUNK, expert, observation, policy
from rounding import assert_same_up_to

from vla_rl.core.capabilities import ActionTokens, HasCritic, HasReference
from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.models.openvla.checkpoint import read_part
from vla_rl.plugins.models.openvla.heads import L1Head
from vla_rl.plugins.models.openvla.policy import L1Policy
from vla_rl.runtime.start import run
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError


def waves(head: L1Head) -> dict[str, torch.Tensor]:
    """Weights that can be written down: sin(0), sin(1), ... over all tensors in their order."""
    state, n = head.state_dict(), 0
    for name, tensor in state.items():
        values = torch.sin(torch.arange(n, n + tensor.numel(), dtype=torch.float64))
        state[name], n = values.reshape(tensor.shape).float(), n + tensor.numel()
    return state


def test_numbers_of_the_original_code(tmp_path: Path) -> None:
    """openvla-oft's L1RegressionActionHead for 3 dimensions, chunks of 2, width 4, saved from a wrapped module."""
    head = L1Head(4, 3)
    path = tmp_path / "action_head--150000_checkpoint.pt"
    torch.save({f"module.{name}": tensor for name, tensor in waves(head).items()}, path)
    head.load_state_dict(read_part(path))
    hidden = torch.cos(torch.arange(2 * 6 * 4, dtype=torch.float64)).reshape(2, 6, 4).float()
    wanted = [
        [[-1.1134133338928223, 1.2048763036727905, 1.4638915061950684],
         [-1.0221601724624634, 1.1407132148742676, 1.4565178155899048]],
        [[-0.9243589639663696, 1.0717676877975464, 1.4488481283187866],
         [-0.8421108722686768, 1.0152961015701294, 1.4404245615005493]],
    ]  # fmt: skip
    assert_same_up_to(8, head(hidden), torch.tensor(wanted))


def test_public_keys_of_the_full_size() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in L1Head(4096, 7).state_dict().items()}
    assert len(shapes) == 16
    assert shapes["model.layer_norm1.weight"] == (28672,)
    assert shapes["model.fc1.weight"] == (4096, 28672)
    assert shapes["model.mlp_resnet_blocks.1.ffn.1.weight"] == (4096, 4096)
    assert shapes["model.fc2.bias"] == (7,)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_imitation_then_save_then_load(tmp_path: Path, lora: Any) -> None:
    model, obs, actions = policy(head="l1", lora=lora), observation(4), expert(4)
    assert isinstance(model, L1Policy)
    trained = [p for p in model.module.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(trained, 1e-3 if lora is None else 3e-3)
    first = model.imitation_loss(obs, actions).item()
    for _ in range(80):
        optimiser.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimiser.step()
    assert all(p.grad is not None for p in trained)
    last = model.imitation_loss(obs, actions).item()
    assert last < 0.25 * first
    acted = model.sample_chunk(obs, noise(4), True)
    assert acted.actions.shape == (4, CHUNK, 3)
    assert acted.actions.dtype == acted.log_probs.dtype == torch.float32
    assert acted.log_probs.shape == (4, CHUNK, model.tokens_per_action)
    assert np.abs(acted.actions.numpy() - actions).mean() == pytest.approx(last, abs=1e-6)
    model.save(tmp_path)
    again = policy(checkpoint=str(tmp_path), head="l1").sample_chunk(obs, noise(4), True)
    torch.testing.assert_close(again.actions, acted.actions, rtol=0, atol=1e-5)


def test_statistics_restore_what_the_head_says(tmp_path: Path) -> None:
    policy(head="l1").save(tmp_path)
    unit = policy(checkpoint=str(tmp_path), head="l1").sample_chunk(observation(2), noise(2), True).actions.double()
    stats = json.loads((tmp_path / "dataset_statistics.json").read_text())
    stats["simulator"]["action"] = {"q01": [0.0, -2.0, 0.0], "q99": [0.5, 2.0, 1.0], "mask": [True, True, False]}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(stats))
    got = policy(checkpoint=str(tmp_path), head="l1").sample_chunk(observation(2), noise(2), True).actions
    wanted = torch.stack([0.25 * (unit[..., 0] + 1), 2 * unit[..., 1], unit[..., 2]], dim=-1)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-6)


def test_reinforcement_learning_is_refused() -> None:
    model, obs = policy(head="l1"), observation(2)
    with pytest.raises(UserError, match=r"cannot be sampled.*needs `deviation: {}` with it"):
        model.sample_chunk(obs, noise(2), False)
    with pytest.raises(UserError, match="no log-probabilities"):
        model.chunk_log_probs(obs, model.sample_chunk(obs, noise(2), True))
    with pytest.raises(MismatchError, match="asks for a critic.*cannot be trained by RL"):
        policy(head="l1", context={"values": "chunk"})
    assert not isinstance(model, HasCritic | HasReference | ActionTokens)
    assert not isinstance(policy(head="l1", lora=LoRAConfig(rank=4)), HasReference)


def test_head_and_checkpoint_belong_together(tmp_path: Path) -> None:
    policy(head="l1").save(tmp_path / "l1")
    policy().save(tmp_path / "discrete")
    with pytest.raises(MismatchError, match=r"trained with the L1 head \(action_head--latest.*model.head: l1"):
        policy(checkpoint=str(tmp_path / "l1"))
    with pytest.raises(MismatchError, match=r"has no action_head--\*_checkpoint.pt"):
        policy(checkpoint=str(tmp_path / "discrete"), head="l1")
    other = tmp_path / "l1" / "action_head--50000_checkpoint.pt"
    other.write_bytes((tmp_path / "l1" / "action_head--latest_checkpoint.pt").read_bytes())
    with pytest.raises(CheckpointError, match="2 files of the action_head; keep one of"):
        policy(checkpoint=str(tmp_path / "l1"), head="l1")


def test_rl_is_refused_before_anything_starts(tmp_path: Path) -> None:
    spec = {
        "name": "l1",
        "model": {"type": "openvla_oft", "preset": "fast", "head": "l1"},
        "env": {"type": "tabletop", "num_envs": 4},
        "rollout": {"chunk": 4, "episodes": 4, "group_size": 4},
        "algorithm": {"type": "grpo"},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
    }
    with pytest.raises(
        UserError, match="'openvla_oft' cannot be trained by reinforcement learning: its `head: l1` gives"
    ):
        run(parse_spec(spec), tmp_path / "run", False)
    assert not (tmp_path / "run").exists()
