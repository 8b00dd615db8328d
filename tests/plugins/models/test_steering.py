"""The steering head of flow policies: the noise it chooses, the policy that stays as it is, folders, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from model_cases import noise
from pi0_cases import CHUNK, ENV, expert, observation, policy
from safetensors.torch import load_file, save_file

from eager_recorder import EagerRecorder, no_host_reads
from vla_rl.core.capabilities import Steerable
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.core.types import UnexecutedActions
from vla_rl.plugins.models import gr00t, pi0, smolvla
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.toolkit.models.acting.cuda_graphs import CapturedFunction
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.flow.config import FlowSDE, SteeringConfig
from vla_rl.toolkit.models.heads import STEERING_HEAD

SMALL = SteeringConfig(range=2.0, hidden=(16,))
MODELS: dict[str, Any] = {
    "pi0": (pi0.plugin, Pi0Config),
    "pi05": (pi0.pi05, Pi05Config),
    "smolvla": (smolvla.plugin, SmolVLAConfig),
    "gr00t": (gr00t.plugin, GrootConfig),
}


def build(name: str, **config: Any) -> Any:
    plugin, settings = MODELS[name]
    if "checkpoint" not in config:
        config.setdefault("preset", "tiny")
    return plugin.build(settings(**config), ModelContext(env=ENV, chunk=CHUNK))


def moved(model: Any) -> Any:
    """The same with a head that has been trained: its first means are about 0."""
    with torch.no_grad():
        for parameter in model.module.steering.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_flow_policy_is_steered_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """A folder without a head, the same with one, and what that saves: its network's file is the first one's."""
    obs = observation(3)
    base = build(name)
    base.save(tmp_path / "base")
    model = moved(build(name, checkpoint=str(tmp_path / "base"), steering=SMALL))
    assert all(p.requires_grad == n.startswith("steering.") for n, p in model.module.named_parameters())
    assert {n for n, _ in model.weights()} == {n for n, p in model.module.named_parameters() if p.requires_grad}

    chunk = model.sample_chunk(obs, noise(3), False)
    scores = model.chunk_log_probs(obs, chunk)
    torch.testing.assert_close(scores.log_probs, chunk.log_probs, rtol=0, atol=1e-5)
    assert scores.log_probs.requires_grad
    greedy = model.sample_chunk(obs, noise(3), True)
    assert (greedy.actions - base.sample_chunk(obs, noise(3), True).actions).abs().max() > 1e-3

    model.save(tmp_path / "steered")
    files = [next((tmp_path / folder).glob("model*.safetensors")) for folder in ("base", "steered")]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = build(name, checkpoint=str(tmp_path / "steered"))
    assert again.steering_shape == model.steering_shape
    assert torch.equal(again.sample_chunk(obs, noise(3), True).actions, greedy.actions)


@pytest.mark.parametrize(("per_action", "vectors"), [(False, 1), (True, CHUNK)])
def test_noise_is_in_its_range_and_repeated_over_the_chunk(per_action: bool, vectors: int) -> None:
    model = moved(policy(steering=attrs.evolve(SMALL, per_action=per_action)))
    assert model.steering_shape == (vectors, ENV.action_dim)
    unsquashed = 5 * torch.randn(4, *model.steering_shape)
    start = model.module.steering.initial_noise(unsquashed)
    assert start.shape == (4, CHUNK, ENV.action_dim)
    assert start.abs().max() <= 2.0
    torch.testing.assert_close(start, (2 * torch.tanh(unsquashed)).expand_as(start))


def test_the_chunk_is_the_odes_from_the_noise_of_the_head() -> None:
    """Against the same policy without a head, whose start is put in by hand."""
    obs = observation(3)
    model = moved(policy(steering=SMALL))
    plain = policy()
    with torch.no_grad():
        features = model.policy_features(obs)
        mean, log_probs = model.steering_noise(features, torch.zeros(3, *model.steering_shape))
    start = (2 * mean).expand(-1, CHUNK, -1)
    inputs = {**plain._build_inputs(obs), "start": start}
    greedy = model.sample_chunk(obs, noise(3), True)
    with torch.no_grad():
        torch.testing.assert_close(plain.decide(inputs)["actions"], greedy.actions, rtol=0, atol=1e-6)
        torch.testing.assert_close(plain.policy_features(obs), features)
    torch.testing.assert_close(log_probs.sum((1, 2)), greedy.log_probs.sum((1, 2)), rtol=0, atol=1e-4)
    assert not features.requires_grad


def test_a_new_head_starts_about_where_the_greedy_policy_does() -> None:
    model = policy(steering=SMALL)
    with torch.no_grad():
        mean, _ = model.steering_noise(model.policy_features(observation(8)), torch.zeros(8, *model.steering_shape))
    assert mean.abs().max() < 0.1


def test_real_time_chunks_are_steered() -> None:
    obs = observation(2)
    one, other = policy(), moved(policy(steering=SMALL))
    for greedy in (True, False):
        chunks = [model.continue_chunk(obs, noise(2), greedy, [_left(), _left()]) for model in (one, other)]
        assert (chunks[0] - chunks[1]).abs().max() > 1e-4


def _left() -> Any:
    return UnexecutedActions(actions=expert(1)[0][:2], delay=1)


@pytest.mark.parametrize("greedy", [True, False])
def test_steered_decisions_can_be_captured(greedy: bool) -> None:
    """`rollout.compile: graphs` captures them: from tensors to tensors, without host reads."""
    model = moved(policy(steering=SMALL))
    obs = observation(3)
    expected = model.sample_chunk(obs, noise(3), greedy)
    captured = CapturedFunction(model.decide, EagerRecorder())

    def watched(inputs: Any) -> Any:
        with no_host_reads():
            return captured(inputs)

    model.decide = watched
    decided = model.sample_chunk(obs, noise(3), greedy)
    torch.testing.assert_close(decided.actions, expected.actions, rtol=0, atol=1e-5)
    torch.testing.assert_close(decided.log_probs, expected.log_probs, rtol=0, atol=1e-5)
    assert decided.extras.keys() == {"steering"}


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"train_expert_only": False}, "leave `train_expert_only` out"),
        ({"noise": FlowSDE(level=0.3), "greedy_start": "fixed_noise"}, "leave `noise` and `greedy_start` out"),
        ({"lora": LoRAConfig(rank=2)}, "leave `lora` out"),
    ],
)
def test_keys_that_a_frozen_policy_has_no_use_for_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Pi0Config(preset="tiny", steering=SMALL, **keys)


@pytest.mark.parametrize("keys", [{"range": 0.0}, {"range": -1.0}, {"hidden": (0,)}])
def test_sizes_that_make_no_sense_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))):
        SteeringConfig(**keys)


def test_a_steered_policy_cannot_clone_and_another_is_not_steerable() -> None:
    obs = observation(2)
    with pytest.raises(UserError, match="its weights are frozen: it cannot clone"):
        policy(steering=SMALL).imitation_loss(obs, expert(2))
    assert isinstance(policy(steering=SMALL), Steerable) and not isinstance(policy(), Steerable)
    assert type(policy(steering=SMALL)) is type(policy(steering=SMALL))


def test_another_head_than_the_folders_is_refused(tmp_path: Path) -> None:
    policy(steering=SMALL).save(tmp_path)
    assert policy(checkpoint=str(tmp_path), steering=SMALL).steering_shape == (1, ENV.action_dim)
    with pytest.raises(MismatchError, match=r"'range': 2.0.*asks for .*'range': 1.5"):
        policy(checkpoint=str(tmp_path), steering=SteeringConfig())
    weights = load_file(tmp_path / STEERING_HEAD)
    save_file({name: tensor for name, tensor in weights.items() if name != "range"}, tmp_path / STEERING_HEAD)
    with pytest.raises(CheckpointError, match="is not a steering head"):
        policy(checkpoint=str(tmp_path))
    save_file({**weights, "norm.weight": torch.ones(3)}, tmp_path / STEERING_HEAD)
    with pytest.raises(CheckpointError, match="norm.weight"):
        policy(checkpoint=str(tmp_path))
