"""`offline`: rewards of recordings, the formulas of AWR and IQL, and what they make of a recording."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scripted_runs import scripted_spec

from vla_rl.core.catalogue import load
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.trainers import DemonstrationsData, ImitationStep
from vla_rl.core.types import Observation, RecordedRewards
from vla_rl.plugins.trainers.offline.config import AWR, IQL, OfflineConfig
from vla_rl.plugins.trainers.offline.impl import Offline
from vla_rl.runtime.checks.run import check_spec
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.data.samples import InMemoryDataset, StepWindows
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.critics import CriticEnsemble, advantage_weights, expectile_loss, update_target
from vla_rl.toolkit.trainers.recorded_returns import read_returns
from vla_rl.toolkit.trainers.trained_model import TrainedModel

CHUNK = 2
INFO = synthetic.env_info(cameras=1, state_dim=3, action_dim=2)


class Bandit(InMemoryDataset):
    """Episodes of one sample each, all from one state: the chunk `good` earns 1, the chunk `bad` nothing."""

    def __init__(self, count: int) -> None:
        obs = synthetic.observation(INFO, 1)
        obs = Observation(
            images={name: np.repeat(image, count, 0) for name, image in obs.images.items()},
            instructions=obs.instructions * count,
            state=np.repeat(np.asarray(obs.state), count, 0),
        )
        self.good = np.arange(count) % 2 == 0
        low, high = np.array(INFO.action_low, np.float32), np.array(INFO.action_high, np.float32)
        actions = np.where(self.good[:, None, None], low + 0.1 * (high - low), low + 0.9 * (high - low))
        super().__init__([(obs, np.repeat(actions, CHUNK, 1).astype(np.float32))])

    def read_rewards(self, indices, discount):
        index = np.asarray(indices)
        return RecordedRewards(rewards=self.good[index].astype(np.float32), following=np.full(len(index), -1))


def trainer_of(model, **keys):
    train = TrainSpec(steps=1, lr=1e-2, micro_batch=8)
    trained = TrainedModel(model, train, name="linear", device="cpu", info=INFO, acting=True)
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None)
    return Offline(OfflineConfig(**keys), training)


def steps_on(count, number, lr=3e-2):
    return [
        ImitationStep(number=i + 1, first=0, indices=np.arange(count), total=count, most=count, lr=lr)
        for i in range(number)
    ]


# ------------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_rewards_until_the_next_sample_or_the_end(chunk):
    lengths, discount = (5, 4, 3), 0.9
    rewards = np.random.default_rng(0).random(sum(lengths)).astype(np.float32)
    windows = StepWindows(lengths, chunk)
    first = np.cumsum([0, *lengths[:-1]])
    indices = np.arange(len(windows))
    episodes, steps = windows.locate_samples(indices)
    recorded = windows.sum_rewards(
        indices, rewards, first[episodes] + steps, first[episodes] + np.array(lengths)[episodes] - 1, chunk, discount
    )
    for index, episode, step in zip(indices, episodes, steps, strict=True):
        length = lengths[episode]
        follows = step + chunk <= length - chunk
        until = step + chunk if follows else length
        own = rewards[first[episode] :]
        assert recorded.following[index] == (index + chunk if follows else -1)
        expected = sum(discount ** (t - step) * own[t] for t in range(step, until))
        assert recorded.rewards[index] == pytest.approx(expected, rel=1e-6)


def test_returns_are_those_of_the_whole_episode_and_span_one():
    class Recording(InMemoryDataset):
        def read_rewards(self, indices, discount):
            following = np.array([1, 2, -1, -1])
            return RecordedRewards(rewards=np.array([0, 1, 2, 0], np.float32), following=following)

    recording = Recording([(synthetic.observation(INFO, 4), np.zeros((4, CHUNK, 2), np.float32))])
    recorded = read_returns(recording, 0.5, "offline")
    returns = np.array([0 + 0.25 * (1 + 0.25 * 2), 1 + 0.25 * 2, 2, 0])
    np.testing.assert_allclose(recorded.returns, returns / 2, rtol=1e-6)
    np.testing.assert_allclose(recorded.rewards, np.array([0, 1, 2, 0]) / 2)


# ------------------------------------------------------------------------------------------------------ formulas


def test_expectile_loss_is_minimal_at_the_expectile():
    """|tau - 1(u < 0)| u^2, minimised over v for u = q - v (IQL, eq. 4); 0.5 gives the mean."""
    q = torch.tensor([0.0, 1.0, 4.0, 10.0])
    grid = torch.linspace(0, 10, 100_001)
    for tau in (0.5, 0.7, 0.9):
        losses = sum(expectile_loss(x - grid, tau) for x in q)
        best = float(grid[losses.argmin()])
        upper, lower = (q - best).clamp(min=0).sum() * tau, (best - q).clamp(min=0).sum() * (1 - tau)
        assert float(upper - lower) == pytest.approx(0, abs=1e-2)
    assert float(grid[sum(expectile_loss(x - grid, 0.5) for x in q).argmin()]) == pytest.approx(3.75, abs=1e-3)


def test_weights_and_targets():
    weights = advantage_weights(torch.tensor([0.0, 0.1, -0.1, 5.0]), 0.1, 20.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, np.e, 1 / np.e, 20.0]))
    one = CriticEnsemble(2, 3, (4,), layer_norm=True, seed=0)
    other = CriticEnsemble(2, 3, (4,), layer_norm=True, seed=5)
    before = [p.clone() for p in one.parameters()]
    update_target(one, other, 0.25)
    for slow, old, fast in zip(one.parameters(), before, other.parameters(), strict=True):
        torch.testing.assert_close(slow, 0.75 * old + 0.25 * fast)
    x = torch.ones(5, 3)
    assert one(x).shape == (2, 5) and not torch.equal(*one(x))


# ------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("algorithm", [AWR(), IQL(target_rate=0.1)], ids=["awr", "iql"])
def test_the_better_of_two_recorded_chunks_is_learnt(algorithm):
    """Cloning all of it would be undecided: both chunks are equally frequent."""
    data = Bandit(16)
    model = LinearModel(INFO, CHUNK)
    trainer = trainer_of(model, algorithm=algorithm, lr=1e-2, critic_steps=60)
    first = trainer.update(DemonstrationsData(demonstrations=data, steps=steps_on(16, 60)))
    before = {name: p.clone() for name, p in LinearModel(INFO, CHUNK).module.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in model.module.named_parameters()), "critics alone"
    last = trainer.update(DemonstrationsData(demonstrations=data, steps=steps_on(16, 60)))
    assert last.sums["loss/value"] < first.sums["loss/value"]
    obs, actions = data.read_samples(np.arange(2))
    losses = model.imitation_losses(obs, actions).detach()
    assert losses[0] < 0.2 < 1.5 < losses[1], losses


def test_losses_of_samples_have_the_mean_of_a_batch():
    model = LinearModel(INFO, CHUNK)
    obs = synthetic.observation(INFO, 4)
    actions = np.random.default_rng(0).random((4, CHUNK, INFO.action_dim)).astype(np.float32)
    losses = model.imitation_losses(obs, actions)
    torch.testing.assert_close(losses.mean(), model.imitation_loss(obs, actions))
    torch.testing.assert_close(super(LinearModel, model).imitation_losses(obs, actions), losses)


# ----------------------------------------------------------------------------------------------------- bad input


def test_a_model_without_features_is_refused():
    class Plain(VLAModel):
        sample_chunk = chunk_log_probs = imitation_loss = save = lambda self: None
        module = torch.nn.Linear(2, 2)

    with pytest.raises(UserError, match="policy's features, and model 'linear' gives none"):
        trainer_of(Plain())


def test_equal_returns_are_refused():
    data = Bandit(4)
    data.good[:] = True
    with pytest.raises(UserError, match="all 4 recorded samples have the return 1"):
        trainer_of(LinearModel(INFO, CHUNK)).update(DemonstrationsData(demonstrations=data, steps=steps_on(4, 1)))


def test_demonstrations_without_rewards_are_refused():
    data = InMemoryDataset([(synthetic.observation(INFO, 4), np.zeros((4, CHUNK, INFO.action_dim), np.float32))])
    with pytest.raises(UserError, match="needs recordings with rewards"):
        trainer_of(LinearModel(INFO, CHUNK)).update(DemonstrationsData(demonstrations=data, steps=steps_on(4, 1)))


@pytest.mark.parametrize(
    ("trainer", "imitation", "text"),
    [
        ("offline", None, "learns from recordings with rewards, and here it would get trajectories"),
        ("policy_gradient", "offline", "learns from recordings with rewards, and here it would get demonstrations"),
        ("policy_gradient", "policy_gradient", "learns from trajectories, and here it would get demonstrations"),
    ],
)
def test_a_trainer_of_other_data_is_refused(trainer, imitation, text):
    section = None
    if imitation is not None:
        section = {"expert": {"episodes": 4}, "steps": 1, "lr": 1e-3, "trainer": {"type": imitation}}
    spec = parse_spec(scripted_spec(trainer={"type": trainer}, imitation=section))
    with pytest.raises(SpecError, match=text):
        check_spec(spec, training=imitation is None, imitation=imitation is not None)


def test_keys_of_the_other_algorithm_are_refused():
    with pytest.raises(Problems, match="algorithm.expectile: unknown key"):
        Structurer().read_class({"algorithm": {"type": "awr", "expectile": 0.9}}, OfflineConfig)
    with pytest.raises(Problems, match="expectile: unknown key; now algorithm: {type: iql, expectile: ...}"):
        Structurer().read_class({"expectile": 0.9}, OfflineConfig)
    assert load("trainer", "offline").config is OfflineConfig
