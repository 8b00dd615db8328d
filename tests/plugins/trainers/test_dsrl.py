"""`dsrl`: the contract, the policy that stays as it is, what it learns, what it keeps, a run, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from vla_rl.core import catalogue as plugins
from vla_rl.core.capabilities import STEERING
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.trainers import Transitions, TransitionsData
from vla_rl.core.types import ActionSource
from vla_rl.plugins.models.pi0.builder import build_policy
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.trainers.off_policy import dsrl
from vla_rl.plugins.trainers.off_policy.config import DsrlConfig, Learned, LearnedTemperature
from vla_rl.plugins.trainers.off_policy.steering import Dsrl
from vla_rl.runtime.start import run
from vla_rl.testing import check_trainer, synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.models.flow.config import SteeringConfig
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.trained_model import TrainedModel

CHUNK = 2
INFO = synthetic.env_info(cameras=1, bounds=((-1.0, 1.0),))
SMALL = {"hidden": (16,), "batch": 8, "min_data": 4, "updates_per_step": 1.0}
NAMED = (
    "from vla_rl.plugins.models.pi0 import plugin\n"
    "from vla_rl.plugins.trainers.off_policy import dsrl\n"
    'vla_rl_plugins = {"model": {"pi0_of_the_test": plugin}, "trainer": {"dsrl_of_the_test": dsrl}}\n'
)


def model_of(**steering):
    config = Pi0Config(preset="tiny", denoise_steps=2, steering=SteeringConfig(**{"hidden": (16,), **steering}))
    return build_policy(config, ModelContext(env=INFO, chunk=CHUNK))


def trainer_in(folder, model=None, lr=1e-3, **keys):
    train = TrainSpec(steps=1, lr=lr, micro_batch=64, max_grad_norm=None)
    model = model_of() if model is None else model
    trained = TrainedModel(model, train, name="tiny", device="cpu", info=INFO, acting=True)
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None, folder=folder)
    return Dsrl(DsrlConfig(**{**SMALL, **keys}), training)


def transitions_of(model, count, seed=0, rewards=None):
    """An episode of the policy's own chunks."""
    obs = synthetic.observation(INFO, count + 1, seed=seed)
    numbers = list(range(count + 1))
    chunk = model.sample_chunk(obs, Noise(seed, "test", numbers, numbers, numbers), False)
    rows = np.arange(count)
    noise = np.asarray(chunk.extras[STEERING])[:count]
    return Transitions(
        frames=obs,
        first=rows,
        following=rows + 1,
        actions=np.asarray(chunk.actions)[:count],
        rewards=np.ones((count, CHUNK), np.float32) if rewards is None else rewards(noise),
        valid=np.ones((count, CHUNK), bool),
        terminated=rows == count - 1,
        extras={STEERING: noise},
    )


def data_of(step, transitions):
    return TransitionsData(step=step, version=step - 1, transitions=transitions)


def test_the_contract():
    check_trainer(dsrl, DsrlConfig(**SMALL))


def test_an_update_trains_the_head_and_leaves_the_policy_as_it_is(tmp_path):
    trainer = trainer_in(tmp_path)
    model = trainer._trained.model
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    metrics = trainer.update(data_of(1, transitions_of(model, 12)))
    assert metrics.sums["off_policy/updates"] == 8
    changed = {name for name, tensor in model.module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.startswith("steering.") and name != "steering.range"}


def test_features_and_noise_are_kept_and_images_are_not(tmp_path):
    trainer = trainer_in(tmp_path)
    model = trainer._trained.model
    transitions = transitions_of(model, 6)
    trainer.update(data_of(1, transitions))
    kept = trainer._buffer.read_transitions(np.arange(6))
    with torch.no_grad():
        features = model.policy_features(transitions.frames).numpy()
    np.testing.assert_allclose(kept.obs, features[:6], rtol=0, atol=1e-5)
    np.testing.assert_allclose(kept.following, features[1:], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(kept.actions, np.tanh(transitions.extras[STEERING]))


def test_chunks_of_a_takeover_are_left_out(tmp_path):
    trainer = trainer_in(tmp_path)
    transitions = transitions_of(trainer._trained.model, 6)
    taken_over = np.array([False, True, True, False, False, True])
    source = np.full((6, CHUNK), ActionSource.POLICY, np.int8)
    source[taken_over, 1] = ActionSource.PERSON
    trainer.update(data_of(1, evolve(transitions, source=source)))
    assert len(trainer._buffer) == 3
    noise = np.tanh(transitions.extras[STEERING][~taken_over])
    np.testing.assert_array_equal(trainer._buffer.read_transitions(np.arange(3)).actions, noise)
    trainer.update(data_of(2, evolve(transitions, source=np.full((6, CHUNK), ActionSource.PERSON, np.int8))))
    assert len(trainer._buffer) == 3


def test_noise_that_earns_most_is_learnt(tmp_path):
    """The reward falls with the distance of the noise, scaled to (-1, 1), from 0.5."""
    trainer = trainer_in(tmp_path, lr=3e-3, temperature=0.01, batch=64, discount=0.5)
    model = trainer._trained.model

    def rewards(noise):
        distance = np.abs(np.tanh(noise) - 0.5).mean((1, 2))
        return np.stack([1 - distance, np.zeros_like(distance)], axis=1).astype(np.float32)

    for step in range(1, 9):
        trainer.update(data_of(step, transitions_of(model, 40, seed=step, rewards=rewards)))
    obs = synthetic.observation(INFO, 8, seed=100)
    with torch.no_grad():
        noise, _ = model.steering_noise(model.policy_features(obs), torch.zeros(8, *model.steering_shape))
    assert (noise - 0.5).abs().mean() < 0.25


def test_the_entropy_aims_at_half_of_the_noises_numbers():
    given = Learned(learned=LearnedTemperature(target_entropy=1.0))
    assert DsrlConfig().of_noise(8).temperature.learned.target_entropy == -4
    assert DsrlConfig(temperature=given).of_noise(8).temperature == given
    assert DsrlConfig(temperature=0.1).of_noise(8).temperature == 0.1


def test_a_run_steers_and_its_checkpoint_does_so_by_itself(tmp_path: Path):
    (tmp_path / "named.py").write_text(NAMED)
    steering = {"range": 1.0, "hidden": [16]}
    spec = {
        "name": "steer",
        "seed": 0,
        "plugins": [str(tmp_path / "named.py")],
        "model": {"type": "pi0_of_the_test", "checkpoint": str(tmp_path / "base"), "steering": steering},
        "env": {"type": "tabletop", "num_envs": 2, "tasks": ["pick_red"], "max_steps": 8},
        "rollout": {"chunk": 4, "episodes": 2},
        "trainer": {"type": "dsrl_of_the_test", "min_data": 4, "batch": 8, "updates_per_step": 1, "hidden": [16]},
        "runtime": {"backend": "local"},
        "train": {"steps": 2, "lr": 1e-3, "micro_batch": 8},
        "eval": {"episodes_per_task": 2},
        "hooks": [{"type": "jsonl"}],
    }
    parsed = parse_spec(spec)
    info = plugins.build("env", "tabletop", parsed.env.config, EnvContext(num_envs=1)).info
    build_policy(Pi0Config(preset="tiny"), ModelContext(env=info, chunk=4)).save(tmp_path / "base")
    run(parsed, tmp_path / "run", False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("off_policy/updates", 0) for line in lines) > 0
    folder = tmp_path / "run" / "checkpoints" / "step_000002" / "model"
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "base" / "model.safetensors").read_bytes()
    model = build_policy(Pi0Config(checkpoint=str(folder)), ModelContext(env=info, chunk=4))
    assert model.steering_shape == (1, 3)


# -------------------------------------------------------------------------------------------------------- bad input


def test_models_without_noise_or_without_a_head_are_refused(tmp_path):
    with pytest.raises(
        UserError, match="model 'tiny' has none; set model.steering: {} \\(pi0, pi05, smolvla and gr00t take it\\)"
    ):
        trainer_in(tmp_path, LinearModel(INFO, CHUNK))
    plain = build_policy(Pi0Config(preset="tiny"), ModelContext(env=INFO, chunk=CHUNK))
    with pytest.raises(UserError, match=r"model 'tiny' has none; set model.steering: \{\}"):
        trainer_in(tmp_path, plain)
