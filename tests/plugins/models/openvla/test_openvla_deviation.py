"""The L1 head with a deviation: sampled, scored and trained by RL from a checkpoint that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import noise, reloading
from openvla_cases import CHUNK, ENV, expert, observation, policy

from vla_rl.core.capabilities import HasReference
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.models.openvla import openvla_oft
from vla_rl.plugins.models.openvla.config import ActionAttentionHeadConfig, DeviationConfig, OpenVLAOFTConfig
from vla_rl.runtime.start import run
from vla_rl.testing import check_model
from vla_rl.toolkit.models.adapters import LoRAConfig

LAPLACE, GAUSSIAN = DeviationConfig(), DeviationConfig(kind="gaussian", start=0.2)
NORMAL: dict[str, Any] = {"laplace": torch.distributions.Laplace, "gaussian": torch.distributions.Normal}


@pytest.mark.parametrize(
    ("values", "temperature", "config"),
    [
        ("chunk", 1.6, {"deviation": LAPLACE, "freeze_vision": True, "reuse_vision_features": True}),
        ("action", 1.0, {"deviation": GAUSSIAN, "value_head": ActionAttentionHeadConfig()}),
        ("none", 1.0, {"deviation": LAPLACE, "lora": LoRAConfig(rank=4)}),
    ],
)
def test_contract(values: Any, temperature: float, config: dict[str, Any]) -> None:
    given = OpenVLAOFTConfig(preset="fast", head="l1", **config)
    place = {"env": ENV, "chunk": CHUNK, "values": values, "temperature": temperature}

    check_model(openvla_oft, given, atol=2e-5, reload=reloading(given), **place)


@pytest.mark.parametrize("deviation", [LAPLACE, GAUSSIAN])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_density_entropy_and_draws(deviation: DeviationConfig, temperature: float) -> None:
    """Torch's own distribution around the head's actions; T = 2: its square root, as a density."""
    model = policy(head="l1", deviation=deviation, context={"temperature": temperature})
    rows = 300
    obs = observation(2).take(np.zeros(rows, int))
    with torch.no_grad():
        model.module.deviation.log_scale += torch.linspace(-1, 1, CHUNK * ENV.action_dim).reshape(CHUNK, -1)
    chunk, mean = (
        model.sample_chunk(obs, noise(rows), False),
        model._predict_actions(obs, model._prepare_images(obs))[0].detach(),
    )
    scale = model.module.deviation.log_scale.detach().exp()
    around = NORMAL[deviation.kind](mean, scale * (temperature if deviation.kind == "laplace" else temperature**0.5))
    sampled, scores = chunk.extras["sampled"], model.chunk_log_probs(obs, chunk)
    wanted = around.log_prob(sampled).sum(-1, keepdim=True)
    torch.testing.assert_close(chunk.log_probs, wanted, rtol=0, atol=1e-5)
    assert torch.equal(scores.log_probs, chunk.log_probs)
    torch.testing.assert_close(scores.entropy, around.entropy().sum(-1, keepdim=True), rtol=0, atol=1e-5)
    plain = NORMAL[deviation.kind](0.0, scale).log_prob(sampled - mean) / temperature
    off = plain.sum(-1, keepdim=True) - wanted
    torch.testing.assert_close(off, off[:1].expand_as(off), rtol=0, atol=2e-4)
    chances = around.cdf(sampled)  # uniform, if the draws are what they are scored as
    worst = (chances.sort(0).values - torch.linspace(0, 1, rows)[:, None, None]).abs().amax(0)
    assert worst.max() < 1.95 / rows**0.5  # Kolmogorov and Smirnov: 1 in 1000 for one of the 12
    again = model.sample_chunk(obs.take(np.arange(7, 9)), rows_of(7, 9), False)
    torch.testing.assert_close(again.extras["sampled"], sampled[7:9], rtol=0, atol=1e-5)


def rows_of(start: int, stop: int) -> Any:
    """Noise of some rows of `noise(n)`, whose keys are their numbers."""
    from vla_rl.core.randomness import Noise

    return Noise(0, "test", range(start, stop), [0] * (stop - start), [0] * (stop - start))


def test_a_public_checkpoint_is_trained_and_saved(tmp_path: Path) -> None:
    """Greedy actions are the head's, within the simulator's bounds; the head is saved as it was found."""
    plain, obs = policy(head="l1"), observation(3)
    plain.save(tmp_path / "l1")
    model = policy(checkpoint=str(tmp_path / "l1"), head="l1", deviation=LAPLACE)
    greedy = [m.sample_chunk(obs, noise(3), True).actions for m in (plain, model)]
    low, high = (torch.tensor(bound) for bound in (ENV.action_low, ENV.action_high))
    assert torch.equal(greedy[1], greedy[0].clamp(low, high))
    with torch.no_grad():
        model.module.deviation.log_scale.fill_(0.5)
    wide = model.sample_chunk(obs, noise(3), False)
    assert ((wide.actions >= low) & (wide.actions <= high)).all()
    assert (model.codec.restore_actions(wide.extras["sampled"].double()) > high).any()
    model.save(tmp_path / "trained")
    again = policy(checkpoint=str(tmp_path / "trained"), head="l1", deviation=DeviationConfig(start=0.01))
    assert torch.equal(again.module.deviation.log_scale, model.module.deviation.log_scale)
    folders = [{file.name for file in (tmp_path / name).iterdir()} for name in ("l1", "trained")]
    assert folders[1] - folders[0] == {"deviation.safetensors"}
    without = policy(checkpoint=str(tmp_path / "trained"), head="l1").sample_chunk(obs, noise(3), True)
    assert torch.equal(without.actions, greedy[0])


def test_the_reference_is_the_policy_at_its_start() -> None:
    model, obs = policy(head="l1", deviation=GAUSSIAN, lora=LoRAConfig(rank=4)), observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)
    optimiser = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], 1e-2)
    model.chunk_log_probs(obs, chunk).log_probs.sum().backward()
    optimiser.step()
    assert (model.chunk_log_probs(obs, chunk).log_probs - chunk.log_probs).abs().max() > 1e-2
    assert torch.equal(model.reference_log_probs(obs, chunk), chunk.log_probs)
    assert not isinstance(policy(head="l1", deviation=GAUSSIAN), HasReference)


@pytest.mark.parametrize("deviation", [LAPLACE, GAUSSIAN])
def test_rewards_move_the_head(tmp_path: Path, deviation: DeviationConfig) -> None:
    """From an L1 checkpoint, by group-relative advantages of how near a chunk is to one that it was never shown."""
    policy(head="l1").save(tmp_path)
    model, rows = policy(checkpoint=str(tmp_path), head="l1", deviation=deviation), 16
    obs, target = observation(2).take(np.zeros(rows, int)), torch.from_numpy(expert(1)).clamp(-0.8, 0.8)

    def error(greedy: bool, seed: int = 0) -> tuple[Any, torch.Tensor]:
        chunk = model.sample_chunk(obs, noise(rows, seed), greedy)
        return chunk, (chunk.actions - target).abs().mean(-1)

    first = error(True)[1].mean().item()
    optimiser = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], 3e-4)
    for step in range(40):
        chunk, wrong = error(False, step)
        gains = -(wrong - wrong.mean(0)) / (wrong.std(0) + 1e-6)
        optimiser.zero_grad()
        (-gains[..., None] * model.chunk_log_probs(obs, chunk).log_probs).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimiser.step()
    assert error(True)[1].mean().item() < 0.5 * first


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_from_an_l1_checkpoint(tmp_path: Path, algorithm: str) -> None:
    from vla_rl.core import catalogue
    from vla_rl.core.contexts import EnvContext

    named = catalogue.load("env", "tabletop").config(tasks=("pick_red",))
    env = catalogue.build("env", "tabletop", named, EnvContext(num_envs=1))
    policy(env=env.info, head="l1").save(tmp_path / "l1")
    spec = {
        "name": "l1",
        "model": {"type": "openvla_oft", "checkpoint": str(tmp_path / "l1"), "head": "l1", "deviation": {"start": 0.2}},
        "env": {"type": "tabletop", "num_envs": 4, "tasks": ["pick_red"], "max_steps": 8},
        "eval": {"before": False, "episodes_per_task": 1},
        "rollout": {"chunk": 4, "episodes": 4, "group_size": 4 if algorithm == "grpo" else 1},
        "algorithm": {"type": algorithm},
        "runtime": {"backend": "local"},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
    }
    run(parse_spec(spec), tmp_path / "run", False)
    assert (tmp_path / "run/checkpoints/step_000001/model/deviation.safetensors").is_file()


def test_settings_that_contradict() -> None:
    with pytest.raises(ValueError, match="`deviation` belongs to `head: l1`; the head is 'discrete'"):
        OpenVLAOFTConfig(preset="fast", deviation=LAPLACE)
    with pytest.raises(ValueError, match="kind"):
        DeviationConfig(kind="student")
    with pytest.raises(ValueError, match="start"):
        DeviationConfig(start=0.0)
