"""`recap`: advantages, labels and the value function against independent computations, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from attrs import evolve
from test_offline import CHUNK, INFO, Bandit, steps_on

from vla_rl.core.errors import UserError
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import DemonstrationsData
from vla_rl.core.types import RecordedRewards
from vla_rl.plugins.trainers.recap import plugin
from vla_rl.plugins.trainers.recap.config import RecapConfig
from vla_rl.plugins.trainers.recap.impl import (
    Recap,
    build_value_network,
    categorical_targets,
    condition_on_labels,
    expected_values,
    positive_labels,
)
from vla_rl.plugins.trainers.recap.label import NEGATIVE, POSITIVE
from vla_rl.testing import check_trainer, synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.recorded_returns import RecordedReturns, read_returns
from vla_rl.toolkit.trainers.trained_model import TrainedModel


class Listening(LinearModel):
    """Keeps the instructions that it is trained with."""

    def imitation_loss(self, obs, actions):
        self.heard = [*getattr(self, "heard", []), obs.instructions]
        return super().imitation_loss(obs, actions)


def trainer_of(model, **keys):
    train = TrainSpec(steps=1, lr=1e-2, micro_batch=8)
    trained = TrainedModel(model, train, name="linear", device="cpu", info=INFO, acting=True)
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None)
    return Recap(RecapConfig(**keys), training)


def recorded_of(rewards, following, chunk_discount):
    returns = np.array(rewards, np.float64)
    for i in range(len(returns) - 1, -1, -1):
        if following[i] >= 0:
            returns[i] += chunk_discount * returns[following[i]]
    return RecordedReturns(
        recording=None,
        rewards=np.array(rewards, np.float32),
        following=np.array(following),
        returns=returns.astype(np.float32),
        interventions=np.zeros(len(rewards), bool),
        chunk_discount=chunk_discount,
    )


# ------------------------------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize("horizon", [1, 2, 3, 10, None])
def test_advantages_of_n_steps(horizon):
    """Two episodes of 4 and 2 samples, summed sample by sample."""
    lengths, discount = (4, 2), 0.9
    draws = np.random.default_rng(0)
    rewards, values = (draws.random(sum(lengths)).astype(np.float32) for _ in range(2))
    recorded = recorded_of(rewards, [1, 2, 3, -1, 5, -1], discount)
    first = 0
    for length in lengths:
        for step in range(length):
            end = length if horizon is None else min(step + horizon, length)
            expected = sum(discount ** (k - step) * rewards[first + k] for k in range(step, end))
            if end < length:
                expected += discount ** (end - step) * values[first + end]
            actual = recorded.compute_advantages(values, horizon)[first + step]
            assert actual == pytest.approx(expected - values[first + step], abs=1e-6)
        first += length


def test_labels_have_a_threshold_for_each_task():
    """The easy task's worst advantage is above the hard one's best: one threshold would label the easy task alone."""
    advantages = np.concatenate([np.arange(10), 100 + np.arange(20)]).astype(np.float32)
    tasks = ["hard"] * 10 + ["easy"] * 20
    labels = positive_labels(advantages, tasks, 0.3, np.zeros(30, bool))
    assert np.flatnonzero(labels).tolist() == [7, 8, 9, 24, 25, 26, 27, 28, 29]


def test_interventions_are_positive_and_move_no_threshold():
    advantages = np.array([0, 1, 2, 3, -50, 90], np.float32)
    helped = np.array([False] * 4 + [True] * 2)
    labels = positive_labels(advantages, ["task"] * 6, 0.5, helped)
    assert labels.tolist() == [False, False, True, True, True, True]
    assert positive_labels(advantages, ["task"] * 6, 0.5, np.ones(6, bool)).all()


def test_equal_advantages_have_equal_labels():
    advantages = np.array([1, 0, 1, 0], np.float32)
    no_takeovers = np.zeros(4, bool)
    assert positive_labels(advantages, ["task"] * 4, 0.25, no_takeovers).tolist() == [True, False, True, False]
    assert positive_labels(advantages, ["task"] * 4, 0.9, no_takeovers).tolist() == [True, False, True, False]
    assert not positive_labels(np.zeros(4, np.float32), ["task"] * 4, 0.25, no_takeovers).any()


def test_the_value_is_the_mean_of_a_categorical_distribution():
    atoms = torch.linspace(-1, 1, 5)
    returns = torch.tensor([-1.0, -0.76, -0.74, 0.2, 0.3, 1.0, 7.0])
    expected = [min(range(5), key=lambda i: abs(float(atoms[i] - value))) for value in returns]
    assert categorical_targets(returns, atoms).tolist() == expected
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]]))
    assert float(expected_values(logits, atoms)) == pytest.approx(0.1 * -1 + 0.2 * -0.5 + 0.4 * 0.5, abs=1e-6)


def test_samples_get_their_labels():
    obs = synthetic.observation(INFO, 3)
    texts = obs.instructions
    told = condition_on_labels(obs, np.array([True, False, True]), np.array([False, False, True])).instructions
    assert told == (texts[0] + POSITIVE, texts[1] + NEGATIVE, texts[2])


# ------------------------------------------------------------------------------------------------------ learning


def test_the_policy_waits_for_the_value_function_and_hears_each_label():
    data = Bandit(16)
    model = Listening(INFO, CHUNK)
    trainer = trainer_of(model, critic_steps=4, lr=1e-2, atoms=11, positive_share=0.5, dropout=0.25)
    model.instruction_suffix = POSITIVE
    before = copy.deepcopy(model.module.state_dict())
    first = trainer.update(DemonstrationsData(demonstrations=data, steps=steps_on(16, 4)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert not hasattr(model, "heard") and first.sums["loss/imitation"] == 0
    value = copy.deepcopy(trainer.modules()["value"].state_dict())
    trainer.update(DemonstrationsData(demonstrations=data, steps=steps_on(16, 30)))
    assert all(torch.equal(tensor, value[name]) for name, tensor in trainer.modules()["value"].state_dict().items())
    assert model.instruction_suffix == POSITIVE
    texts = data.read_samples(np.arange(16))[0].instructions
    dropped = 0
    for number in range(30):
        heard = [text for part in model.heard[2 * number : 2 * number + 2] for text in part]
        for told, text, good in zip(heard, texts, data.good, strict=True):
            dropped += told == text
            assert told in (text, text + (POSITIVE if good else NEGATIVE))
    assert 0.15 < dropped / (30 * 16) < 0.35
    assert len({tuple(map(len, pair)) for pair in zip(model.heard[::2], model.heard[1::2], strict=True)}) == 1


def test_a_step_over_both_phases_equals_one_after_the_other():
    results = []
    for parts in ([6], [3, 3], [1, 5]):
        model = LinearModel(INFO, CHUNK)
        trainer = trainer_of(model, critic_steps=3, atoms=11)
        data, steps = Bandit(16), steps_on(16, 6)
        for part in parts:
            trainer.update(DemonstrationsData(demonstrations=data, steps=steps[:part]))
            steps = steps[part:]
        results.append(torch.cat([p.detach().flatten() for p in model.module.parameters()]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("critic_steps", [1, 2])
def test_the_trainer_keeps_to_the_contract(critic_steps):
    """With 1 the updates after the first train the policy."""
    check_trainer(plugin, RecapConfig(critic_steps=critic_steps))


def test_gradients_of_the_policy_are_sums_over_micro_batches_and_ranks():
    def gradients(micro_batch, samples):
        trained = TrainedModel(
            LinearModel(INFO, CHUNK),
            TrainSpec(steps=1, lr=1e-2, micro_batch=micro_batch, max_grad_norm=None),
            name="linear",
            device="cpu",
            info=INFO,
            acting=True,
        )
        training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None)
        trainer = Recap(RecapConfig(critic_steps=1, atoms=11), training)
        data = Bandit(16)
        (first,) = steps_on(16, 1)
        trainer.update(DemonstrationsData(demonstrations=data, steps=[first]))
        kept = []
        trained.strategy.reduce = lambda parameters: kept.append([p.grad.clone() for p in parameters])
        (step,) = steps_on(16, 1)
        share = {"indices": np.asarray(samples), "first": int(samples[0]), "most": len(samples)}
        trainer.update(DemonstrationsData(demonstrations=data, steps=[evolve(step, **share)]))
        return kept[-1]

    whole = gradients(16, np.arange(16))
    for parts in ([gradients(5, np.arange(16))], [gradients(16, np.arange(6)), gradients(16, np.arange(6, 16))]):
        for expected, *others in zip(whole, *parts, strict=True):
            torch.testing.assert_close(sum(others), expected, rtol=1e-4, atol=1e-7)


def test_the_value_network_depends_on_the_seed_and_on_all_that_it_sees():
    obs = synthetic.observation(INFO, 4)
    make = lambda seed: build_value_network(tuple(INFO.cameras), INFO.state_dim, 7, seed, torch.device("cpu"))  # noqa: E731
    torch.manual_seed(0)
    state = torch.get_rng_state()
    logits = make(1)(obs)
    assert torch.equal(torch.get_rng_state(), state)
    assert logits.shape == (4, 7) and torch.equal(logits, make(1)(obs)) and not torch.equal(logits, make(2)(obs))
    camera = next(iter(INFO.cameras))
    for other in (
        {"state": np.asarray(obs.state) + 1},
        {"instructions": ("something else",) * 4},
        {"images": {**obs.images, camera: 255 - np.asarray(obs.images[camera])}},
    ):
        assert not torch.allclose(make(1)(evolve(obs, **other)), logits)


# ----------------------------------------------------------------------------------------------------- bad input


class Equal(Bandit):
    """Every chunk earns 1."""

    def read_rewards(self, indices, discount):
        index = np.asarray(indices)
        return RecordedRewards(rewards=np.ones(len(index), np.float32), following=np.full(len(index), -1))


def test_recordings_without_both_outcomes_are_refused():
    with pytest.raises(UserError, match="all 4 recorded samples have the return 1"):
        trainer_of(LinearModel(INFO, CHUNK)).update(DemonstrationsData(demonstrations=Equal(4), steps=steps_on(4, 1)))


def test_recordings_without_rewards_are_refused():
    data = InMemoryDataset([(synthetic.observation(INFO, 4), np.zeros((4, CHUNK, INFO.action_dim), np.float32))])
    with pytest.raises(UserError, match="trainer 'recap' needs recordings with rewards"):
        trainer_of(LinearModel(INFO, CHUNK)).update(DemonstrationsData(demonstrations=data, steps=steps_on(4, 1)))


def test_a_recording_in_which_nothing_is_better_is_refused(monkeypatch):
    monkeypatch.setattr(
        RecordedReturns, "compute_advantages", lambda self, values, horizon: np.zeros(len(values), np.float32)
    )
    trainer = trainer_of(LinearModel(INFO, CHUNK), critic_steps=1)
    with pytest.raises(UserError, match="none of 8 recorded samples has a larger advantage"):
        trainer.update(DemonstrationsData(demonstrations=Bandit(8), steps=steps_on(8, 2)))


def test_a_recording_that_has_grown_is_refused():
    trainer = trainer_of(LinearModel(INFO, CHUNK), critic_steps=1, atoms=11)
    trainer.update(DemonstrationsData(demonstrations=Bandit(8), steps=steps_on(8, 2)))
    resumed = trainer_of(LinearModel(INFO, CHUNK), critic_steps=1, atoms=11)
    resumed.load(trainer.state())
    with pytest.raises(UserError, match="had 8 samples .* and has 16 now"):
        resumed.update(DemonstrationsData(demonstrations=Bandit(16), steps=steps_on(16, 1)))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"positive_share": 0.0}, "positive_share"),
        ({"positive_share": 1.0}, "positive_share"),
        ({"dropout": 1.0}, "dropout"),
        ({"critic_steps": 0}, "critic_steps"),
        ({"horizon": 0}, "horizon"),
        ({"atoms": 1}, "atoms"),
    ],
)
def test_keys_out_of_range(keys, key):
    with pytest.raises(ValueError, match=key):
        RecapConfig(**keys)


def test_interventions_of_a_recording_are_read():
    class Helped(Bandit):
        def read_rewards(self, indices, discount):
            return evolve(super().read_rewards(indices, discount), interventions=np.asarray(indices) < 3)

    assert read_returns(Helped(8), 0.9, "recap").interventions.tolist() == [True] * 3 + [False] * 5
    assert not read_returns(Bandit(8), 0.9, "recap").interventions.any()
