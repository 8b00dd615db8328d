"""`off_policy` makes the updates of public implementations: SAC of stable-baselines3, and RLPD's learner.

tools/reference_sac.py ran them and wrote the numbers.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reference_files import reference
from vla_rl.core.capabilities import Reparameterised
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.plugins.trainers.off_policy import impl
from vla_rl.plugins.trainers.off_policy.config import Learned, LearnedTemperature, OffPolicyConfig
from vla_rl.plugins.trainers.off_policy.impl import OffPolicy
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.models.squashed_gaussian import SquashedGaussian
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.replay import TransitionBatch
from vla_rl.toolkit.trainers.trained_model import TrainedModel

CHUNK = 2
INFO = synthetic.env_info(cameras=1, pixels=8, state_dim=5, action_dim=2)
"""Two actions of two numbers: a chunk has the four of the implementations' actions."""


def case_of(file, name):
    data = json.loads(reference("algorithms", file).read_text())
    return data["constants"], data["cases"][name]


def load(layer, parameters):
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(parameters[0]))
        layer.bias.copy_(torch.tensor(parameters[1]))


class Actor(nn.Module):
    """Policy of the implementations: an MLP with two outputs, means and log standard deviations."""

    def __init__(self, networks):
        super().__init__()
        widths = [len(networks["actor"][0][0][0]), *(len(layer[1]) for layer in networks["actor"])]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
        self.mean, self.log_std = (nn.Linear(widths[-1], CHUNK * INFO.action_dim) for _ in range(2))
        for layer, parameters in zip(self.layers(), self.parameters_of(networks), strict=True):
            load(layer, parameters)

    def layers(self):
        return [*self.hidden, self.mean, self.log_std]

    @staticmethod
    def parameters_of(networks):
        return [*networks["actor"], networks["mean"], networks["log_std"]]

    def forward(self, x):
        for layer in self.hidden:
            x = F.relu(layer(x))
        shape = (-1, CHUNK, INFO.action_dim)
        return SquashedGaussian(self.mean(x).view(shape), self.log_std(x).clamp(-20, 2).view(shape))


class ActorModel(LinearModel, Reparameterised):
    """A model whose features are the observations of the implementations."""

    def __init__(self, networks):
        super().__init__(INFO, CHUNK)
        self.module = Actor(networks)
        self.critic = None

    def policy_features(self, obs):
        return torch.zeros(len(obs), 5)

    def reparameterised_actions(self, features, normals):
        distribution = self.module(features)
        unsquashed = distribution.sample(normals)
        low, high = torch.tensor(INFO.action_low), torch.tensor(INFO.action_high)
        actions = (low + high) / 2 + (high - low) / 2 * torch.tanh(unsquashed)
        return actions, distribution.log_prob(unsquashed)


class Drawn:
    """The random numbers that an implementation drew."""

    def __init__(self, update, critics):
        self._update = update
        self._critics = critics

    def standard_normal(self, shape, dtype):
        return np.array([self._update["next_normals"], self._update["normals"]], dtype).reshape(shape)

    def permutation(self, count):
        chosen = self._update["chosen"]
        return np.array(chosen + [number for number in range(self._critics) if number not in chosen])


def load_critic(critic, layers):
    for i, parameters in enumerate(layers):
        load(critic.layers[i], parameters)
        if critic.norms is not None and i < len(critic.norms):
            load(critic.norms[i], parameters[2:])
            critic.norms[i].eps = 1e-6  # flax's


def trainer_of(folder, constants, case, lr):
    before = case["before"]
    count = len(before["critics"])
    learned = LearnedTemperature(
        initial=before["temperature"], lr=lr["temperature"], target_entropy=case["target_entropy"]
    )
    config = OffPolicyConfig(
        critics=count,
        target_critics=len(case["updates"][0]["chosen"]),
        actor_value="mean" if "entropy_backup" in case else "lowest",
        entropy_backup=case.get("entropy_backup", True),
        discount=constants["discount"],
        target_rate=constants["target_rate"],
        hidden=tuple(constants["hidden"]),
        layer_norm=len(before["critics"][0][0]) > 2,
        lr=lr["critic"],
        features="frozen",
        temperature=Learned(learned=learned) if case["learned"] else before["temperature"],
    )
    train = TrainSpec(steps=1, lr=lr["actor"], micro_batch=3, max_grad_norm=None)
    trained = TrainedModel(ActorModel(before), train, name="actor", device="cpu", info=INFO, acting=True)
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None, folder=folder)
    trainer = OffPolicy(config, training)
    for i in range(count):
        load_critic(trainer._critics.critics[i], before["critics"][i])
        load_critic(trainer._target_critics.critics[i], before["targets"][i])
    return trainer


def batch_of(update, discount):
    batch = {name: np.array(values, np.float32) for name, values in update["batch"].items()}
    low, high = np.array(INFO.action_low, np.float32), np.array(INFO.action_high, np.float32)
    actions = batch["actions"].reshape(-1, CHUNK, INFO.action_dim)
    return TransitionBatch(
        obs=batch["obs"],
        following=batch["next_obs"],
        actions=(low + high) / 2 + (high - low) / 2 * actions,
        rewards=batch["rewards"],
        bootstrap=np.float32(discount) * batch["continues"],
    )


def close(values, expected, what):
    """Up to a hundredth of the way that Adam moves a weight in these updates; near 0 its first steps magnify the
    rounding of a gradient."""
    torch.testing.assert_close(
        values.detach(), torch.tensor(expected), rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("sb3_sac.json", "learned temperature"),
        ("sb3_sac.json", "fixed"),
        ("rlpd_sac.json", "ten critics, two drawn, LayerNorm"),
        ("rlpd_sac.json", "five critics, one drawn"),
        ("rlpd_sac.json", "entropy left out of targets"),
    ],
)
def test_updates_are_those_of_the_implementation(tmp_path, monkeypatch, file, name):
    """Losses of each update, and all networks after the last one, target networks included."""
    constants, case = case_of(file, name)
    of_sb3 = file.startswith("sb3")
    lr = dict.fromkeys(constants["lr"], constants["lr"]["critic"]) if of_sb3 else constants["lr"]
    trainer = trainer_of(tmp_path, constants, case, lr)
    count = len(case["before"]["critics"])
    # stable-baselines3: half of the sum over Q-networks, as here; RLPD: their mean
    factor = 1.0 if of_sb3 else 2 / count
    for number, update in enumerate(case["updates"], 1):
        monkeypatch.setattr(impl, "generator", lambda *names, update=update: Drawn(update, count))
        of_critics, of_actor = trainer._make_update(number, batch_of(update, constants["discount"]), "a test")
        assert float(of_critics["loss/critic"]) * factor == pytest.approx(update["critic_loss"], rel=5e-4)
        assert float(of_actor["loss/actor"]) == pytest.approx(update["actor_loss"], rel=5e-4, abs=1e-5)
        if "entropy" in update:
            assert float(of_actor["off_policy/entropy"]) == pytest.approx(update["entropy"], rel=5e-4)
            assert float(of_actor["loss/temperature"]) == pytest.approx(update["temperature_loss"], rel=5e-4)
    after = case["after"]
    for kind, ensemble in (("critics", trainer._critics), ("targets", trainer._target_critics)):
        for critic, layers in zip(ensemble.critics, after[kind], strict=True):
            for i, parameters in enumerate(layers):
                close(critic.layers[i].weight, parameters[0], f"{kind}, layer {i}")
                close(critic.layers[i].bias, parameters[1], f"{kind}, bias of layer {i}")
                if len(parameters) > 2:
                    close(critic.norms[i].weight, parameters[2], f"{kind}, LayerNorm {i}")
    actor = trainer._trained.model.module
    for layer, parameters in zip(actor.layers(), Actor.parameters_of(after), strict=True):
        close(layer.weight, parameters[0], "policy")
        close(layer.bias, parameters[1], "policy")
    assert float(trainer._entropy_weight()) == pytest.approx(after["temperature"], rel=1e-4)
    assert (float(trainer._entropy_weight()) != case["before"]["temperature"]) == case["learned"]
