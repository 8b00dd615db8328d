"""`off_policy`: the formulas of SAC and RLPD, one update by hand, what it learns, resume, and bad input."""

from __future__ import annotations

import copy
import math
import shutil

import attrs
import numpy as np
import pytest
import torch

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.trainers import Transitions, TransitionsData
from vla_rl.core.types import ActionSource, RecordedRewards
from vla_rl.plugins.models.film_resnet import plugin as film_resnet
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, Gaussian, NetworkConfig
from vla_rl.plugins.trainers.off_policy.config import (
    DemonstratedShare,
    Learned,
    LearnedTemperature,
    OffPolicyConfig,
)
from vla_rl.plugins.trainers.off_policy.impl import OffPolicy
from vla_rl.plugins.trainers.off_policy.losses import (
    actor_losses,
    cloning_losses,
    critic_losses,
    ensemble_value,
    soft_targets,
    temperature_losses,
)
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.takeovers import ended_by_takeovers, find_corrections, with_last_action_repeated
from vla_rl.toolkit.trainers.trained_model import TrainedModel
from vla_rl.toolkit.trainers.trainer_state import load_owned_state, owned_state

CHUNK = 2
INFO = synthetic.env_info(cameras=1, pixels=32, state_dim=3, action_dim=2)
WITH_TAKEOVERS = attrs.evolve(INFO, takeovers=True)
NETWORK = NetworkConfig(
    image_size=32, channels=(8,), keypoints=2, words=16, instruction=4, hidden=(16,), head=Gaussian()
)
SMALL = {"hidden": (16,), "batch": 8, "min_data": 4, "capacity": 1000}
MIDDLE, HALF_RANGE = (
    (np.array(INFO.action_high, np.float32) + sign * np.array(INFO.action_low, np.float32)) / 2 for sign in (1, -1)
)


def learned(**keys):
    return Learned(learned=LearnedTemperature(**keys))


def model_of(info=INFO):
    return film_resnet.build(FilmResnetConfig(network=NETWORK), ModelContext(chunk=CHUNK, env=info))


def trainer_in(folder, model=None, micro_batch=64, policy_lr=1e-3, info=INFO, **keys):
    train = TrainSpec(steps=1, lr=policy_lr, micro_batch=micro_batch, max_grad_norm=None)
    model = model_of() if model is None else model
    trained = TrainedModel(model, train, name="tiny", device="cpu", info=info, acting=True)
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None, folder=folder)
    return OffPolicy(OffPolicyConfig(**{**SMALL, **keys}), training)


def transitions_of(count, seed=0, rewards=None):
    """An episode, by default with random rewards."""
    draws = np.random.default_rng(seed)
    actions = MIDDLE + HALF_RANGE * draws.uniform(-1, 1, (count, CHUNK, INFO.action_dim))
    return Transitions(
        frames=synthetic.observation(INFO, count + 1, seed=seed),
        first=np.arange(count),
        following=np.arange(1, count + 1),
        actions=actions.astype(np.float32),
        rewards=draws.random((count, CHUNK)).astype(np.float32) if rewards is None else rewards(actions),
        valid=np.ones((count, CHUNK), bool),
        terminated=np.arange(count) == count - 1,
    )


def data_of(step, *args, demonstrations=None, **keys):
    transitions = transitions_of(*args, **keys)
    return TransitionsData(step=step, version=step - 1, transitions=transitions, demonstrations=demonstrations)


def weights_of(trainer):
    named = {}
    for kind, modules in (("modules", trainer.modules()), ("targets", trainer.targets())):
        for name, module in modules.items():
            named |= {f"{kind}/{name}/{key}": tensor.clone() for key, tensor in module.state_dict().items()}
    return named


def differences(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


# ------------------------------------------------------------------------------------------------------ formulas


def test_targets_by_hand():
    """r + gamma (min_i Q'_i(s', a') - alpha log pi(a' | s')): Haarnoja et al. 2018 (1812.05905), eq. 3 and 5."""
    rewards, bootstrap = torch.tensor([1.0, 0.5]), torch.tensor([0.9, 0.0])
    values, log_probs = torch.tensor([[2.0, 7.0], [3.0, 6.0]]), torch.tensor([-1.5, 4.0])
    targets = soft_targets(rewards, bootstrap, values, log_probs, torch.tensor(0.2))
    assert targets.tolist() == pytest.approx([1.0 + 0.9 * (2.0 + 0.2 * 1.5), 0.5])
    without = soft_targets(rewards, bootstrap, values, None, torch.tensor(0.2))
    assert without.tolist() == pytest.approx([1.0 + 0.9 * 2.0, 0.5])


def test_losses_by_hand():
    q, y = torch.tensor([[1.0, 2.0], [4.0, 2.5]]), torch.tensor([2.0, 3.0])
    assert critic_losses(q, y).tolist() == pytest.approx([(1 + 4) / 2, (1 + 0.25) / 2])
    assert ensemble_value(q, mean=False).tolist() == [1.0, 2.0]
    assert ensemble_value(q, mean=True).tolist() == [2.5, 2.25]
    losses = actor_losses(torch.tensor(0.5), torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0]))
    assert losses.tolist() == pytest.approx([0.5 - 3, -1 - 4])
    actions, executed = torch.tensor([[0.5, -1.0], [0.0, 0.2]]), torch.tensor([[0.0, 1.0], [0.0, -0.2]])
    assert cloning_losses(actions, executed).tolist() == pytest.approx([(0.25 + 4) / 2, 0.16 / 2])


def test_temperature_rises_where_the_entropy_is_below_its_target():
    """J(alpha) = E[-alpha (log pi + target)] (eq. 18), whose derivative is -(log pi + target)."""
    log_temperature = torch.zeros((), requires_grad=True)
    losses = temperature_losses(log_temperature.exp(), torch.tensor([3.0, 1.0]), -4.0)
    assert losses.tolist() == pytest.approx([1.0, 3.0])
    losses.mean().backward()
    assert float(log_temperature.grad) == pytest.approx(2.0)  # the entropy, -2, is above -4: the temperature falls


def hand_update(trainer, number):
    """Return the losses and values of an update, by loops over its transitions, with copies of the networks."""
    config, model = trainer._config, trainer._trained.model
    batch = trainer._draw_batch(number)
    draws = generator(0, "off_policy/noise", number)
    noise = [draws.standard_normal(batch.actions.shape, np.float32) for _ in range(2)]
    chosen = draws.permutation(config.critics)[: config.target_critics].tolist()
    alpha = float(trainer._entropy_weight())
    middle, half = torch.tensor(MIDDLE), torch.tensor(HALF_RANGE)

    def q(ensemble, i, features, chunk):
        return float(ensemble.critics[i](torch.cat([features, ((chunk - middle) / half).flatten()])[None]))

    losses, values, policies, log_probs = [], [], [], []
    with torch.no_grad():
        for b in range(len(batch)):
            row = np.array([b])
            features, following = (
                torch.tensor(obs[row]) if isinstance(obs, np.ndarray) else model.policy_features(obs.take(row))
                for obs in (batch.obs, batch.following)
            )
            chunk, log_prob = model.reparameterised_actions(following, torch.tensor(noise[0][b : b + 1]))
            lowest = min(q(trainer._target_critics, i, following[0], chunk[0]) for i in chosen)
            y = batch.rewards[b] + batch.bootstrap[b] * (lowest - alpha * float(log_prob.sum()))
            mine = [q(trainer._critics, i, features[0], torch.tensor(batch.actions[b])) for i in range(config.critics)]
            losses.append(sum((value - y) ** 2 / 2 for value in mine))
            values.append(np.mean(mine))
            policies.append(model.reparameterised_actions(features, torch.tensor(noise[1][b : b + 1])))
            log_probs.append(float(policies[-1][1].sum()))
    return np.mean(losses), np.mean(values), -np.mean(log_probs), alpha


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"critics": 5, "target_critics": 2, "actor_value": "mean", "discount": 0.8},
        {"temperature": 0.3, "layer_norm": False, "features": "frozen"},
    ],
)
def test_an_update_is_what_the_equations_say(tmp_path, keys):
    trainer = trainer_in(tmp_path, temperature=learned(initial=0.5), **keys) if "temperature" not in keys else None
    trainer = trainer_in(tmp_path, **keys) if trainer is None else trainer
    trainer.update(data_of(1, 4))  # min_data: nothing is due
    trainer._keep_transitions(data_of(2, 1, seed=1))
    loss, value, entropy, alpha = hand_update(trainer, 1)
    metrics = trainer.update(TransitionsData(step=2, version=1, transitions=None)).sums
    assert metrics["off_policy/updates"] == 1
    assert metrics["loss/critic"] == pytest.approx(loss, rel=1e-4)
    assert metrics["off_policy/q"] == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert metrics["off_policy/entropy"] == pytest.approx(entropy, rel=1e-4)
    if "temperature" not in keys:
        target = -CHUNK * INFO.action_dim
        assert metrics["loss/temperature"] == pytest.approx(-alpha * (-entropy + target), rel=1e-4)


# --------------------------------------------------------------------------------------------- what is trained when


def test_updates_follow_the_data(tmp_path):
    """updates_per_step for each transition beyond min_data, however they are divided into steps."""
    trainer = trainer_in(tmp_path, updates_per_step=0.5, min_data=6)
    counts = [trainer.update(data_of(step, size, seed=step)).sums["off_policy/updates"] for step, size in
              ((1, 5), (2, 2), (3, 4), (4, 3))]  # fmt: skip
    assert counts == [0, 0, 2, 2]
    assert trainer.state()["updates"] == 4


def test_the_policys_loss_trains_its_head_alone_and_features_can_be_frozen(tmp_path):
    changed = {}
    for features in ("trained", "frozen"):
        trainer = trainer_in(tmp_path / features, features=features)
        before = weights_of(trainer)
        trainer.update(data_of(1, 6))
        changed[features] = {name.split("/", 2)[2].split(".")[0] for name in differences(before, weights_of(trainer))
                             if name.startswith("modules/policy")}  # fmt: skip
    assert changed == {"trained": {"words", "cameras", "trunk", "head"}, "frozen": {"trunk", "head"}}


def test_cloning_adds_the_distance_from_the_executed_actions(tmp_path):
    """With any micro-batches; without the key there is neither the term nor its metric."""

    def first_update(micro_batch=64, **keys):
        trainer = trainer_in(tmp_path / f"{micro_batch}-{len(keys)}", micro_batch=micro_batch, **keys)
        model = copy.deepcopy(trainer._trained.model.module)
        sums = trainer.update(data_of(1, 5)).sums
        trainer._trained.model.module.load_state_dict(model.state_dict())
        return sums, trainer

    plain, _ = first_update()
    cloned, trainer = first_update(cloning=3.0)
    divided, _ = first_update(cloning=3.0, micro_batch=3)
    batch = trainer._draw_batch(1)
    normals = generator(0, "off_policy/noise", 1).standard_normal((2, *batch.actions.shape), np.float32)[1]
    model = trainer._trained.model
    with torch.no_grad():
        actions = model.reparameterised_actions(model.policy_features(batch.obs), torch.tensor(normals))[0].numpy()
    distance = (((actions - batch.actions) / HALF_RANGE) ** 2).mean()
    assert "off_policy/cloning" not in plain
    assert cloned["off_policy/cloning"] == pytest.approx(distance, rel=1e-4)
    assert cloned["loss/actor"] - plain["loss/actor"] == pytest.approx(3 * distance, rel=1e-3)
    assert divided["loss/actor"] == pytest.approx(cloned["loss/actor"], rel=1e-4)


def test_cloning_keeps_the_policy_near_the_executed_actions(tmp_path):
    """Rewards for actions far from those that were executed: the policy stays where the data are."""

    def distance(cloning):
        trainer = trainer_in(tmp_path / str(cloning), policy_lr=1e-2, temperature=0.001, cloning=cloning, batch=32)
        trainer.update(data_of(1, 60, rewards=lambda actions: actions[..., 0]))
        return trainer.update(data_of(2, 1)).sums["off_policy/cloning"]

    assert distance(100.0) < 0.8 * distance(1e-6)


def test_the_policy_waits_for_its_interval(tmp_path):
    trainer = trainer_in(tmp_path, actor_interval=2, min_data=4)
    heads = [copy.deepcopy(trainer._trained.model.module.head.weight)]
    temperatures = [float(trainer._entropy_weight())]
    for step, size in ((1, 5), (2, 1)):
        trainer.update(data_of(step, size, seed=step))
        heads.append(copy.deepcopy(trainer._trained.model.module.head.weight))
        temperatures.append(float(trainer._entropy_weight()))
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])
    assert temperatures[0] == temperatures[1] != temperatures[2]


@pytest.mark.parametrize("features", ["frozen", "trained"])
def test_the_first_updates_can_be_the_critics_alone(tmp_path, features):
    """Features that moved under a cloned head would change the policy before it is trained."""
    trainer = trainer_in(tmp_path, critic_updates=3, features=features)
    start = weights_of(trainer)
    trainer.update(data_of(1, 7))
    assert {name.split("/")[1] for name in differences(start, weights_of(trainer))} == {"critics"}
    trainer.update(data_of(2, 1))
    assert {name.split("/")[1] for name in differences(start, weights_of(trainer))} == {
        "critics",
        "policy",
        "temperature",
    }


def test_targets_follow_the_critics(tmp_path):
    trainer = trainer_in(tmp_path, target_rate=0.25)
    start = [p.clone() for p in trainer._target_critics.parameters()]
    trainer.update(data_of(1, 5))
    for slow, old, fast in zip(trainer._target_critics.parameters(), start, trainer._critic_parameters, strict=True):
        torch.testing.assert_close(slow, 0.75 * old + 0.25 * fast)
        assert not slow.requires_grad


def test_micro_batches_change_nothing_but_rounding(tmp_path):
    one, other = (trainer_in(tmp_path / str(size), micro_batch=size, policy_lr=1e-4) for size in (64, 3))
    results = [trainer.update(data_of(1, 6)).sums for trainer in (one, other)]
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_global_generators_decide_nothing(tmp_path):
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        trainer = trainer_in(tmp_path / str(seed))
        trainer.update(data_of(1, 8))
        weights.append(weights_of(trainer))
    assert not differences(*weights)


# ------------------------------------------------------------------------------------------------------- learning


def test_the_chunk_that_earns_most_is_learnt(tmp_path):
    """One observation, and a reward that falls with the distance from an action: the policy comes near it."""
    goal = MIDDLE + 0.5 * HALF_RANGE

    def rewards(actions):
        return -(((actions - goal) / HALF_RANGE) ** 2).sum(-1).astype(np.float32)

    made = transitions_of(96, rewards=rewards)
    frames = synthetic.observation(INFO, 1).take(np.zeros(97, np.int64))
    data = attrs.evolve(made, frames=frames, terminated=np.ones(96, bool))
    keys = {"temperature": 0.003, "features": "frozen", "updates_per_step": 3.0, "actor_interval": 4}
    trainer = trainer_in(tmp_path, policy_lr=2e-3, lr=5e-3, hidden=(64, 64), batch=128, **keys)
    trainer.update(TransitionsData(step=1, version=0, transitions=data))
    model = trainer._trained.model
    chunk = model.sample_chunk(synthetic.observation(INFO, 1), Noise(0, "test", [0], [0], [0]), True).actions.numpy()
    assert np.abs((chunk - goal) / HALF_RANGE).max() < 0.25


# --------------------------------------------------------------------------------------------------- demonstrations


class Recording(InMemoryDataset):
    """Episodes of two samples, of which the second one earns a reward."""

    def read_rewards(self, indices, discount):
        index = np.asarray(indices)
        second = index % 2 == 1
        return RecordedRewards(rewards=second.astype(np.float32), following=np.where(second, -1, index + 1))


def recording_of(count=6, action_dim=INFO.action_dim, scale=1.0):
    draws = np.random.default_rng(3)
    middle, half = (np.resize(array, action_dim) for array in (MIDDLE, HALF_RANGE))
    actions = (middle + scale * half * draws.uniform(-1, 1, (count, CHUNK, action_dim))).astype(np.float32)
    return Recording([(synthetic.observation(INFO, count, seed=9), actions)])


def test_frozen_features_are_kept_instead_of_frames(tmp_path):
    """Features of collected transitions and of demonstrations; an update with them equals one with frames."""
    keys = {
        "demonstrations": DemonstratedShare(share=0.5),
        "critic_updates": 100,
    }  # features that are trained wait, too
    frozen = trainer_in(tmp_path / "frozen", features="frozen", **keys)
    trained = trainer_in(tmp_path / "trained", **keys)
    data = data_of(1, 6, demonstrations=recording_of())
    results = [trainer.update(data).sums for trainer in (frozen, trained)]
    for name in ("loss/critic", "off_policy/q"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-4)
    batches = [trainer._draw_batch(1) for trainer in (frozen, trained)]
    with torch.no_grad():
        for kept, obs in zip(
            (batches[0].obs, batches[0].following), (batches[1].obs, batches[1].following), strict=True
        ):
            features = trained._trained.model.policy_features(obs)
            torch.testing.assert_close(torch.tensor(kept), features)
    assert {path.name for path in (tmp_path / "frozen").iterdir()} == {"features", "transitions"}


def test_a_share_of_each_batch_comes_from_demonstrations(tmp_path):
    trainer = trainer_in(tmp_path, demonstrations=DemonstratedShare(share=0.5), discount=0.9)
    recording = recording_of()
    data = data_of(1, 6, demonstrations=recording)
    frames = attrs.evolve(data.transitions.frames, steps=np.arange(7))  # recordings have no counts of steps
    trainer.update(attrs.evolve(data, transitions=attrs.evolve(data.transitions, frames=frames)))
    batch = trainer._draw_batch(1)
    assert len(batch) == len(batch.obs) == 8
    assert batch.obs.steps is None
    obs, actions = recording.read_samples(np.arange(6))
    sources = [[i for i in range(6) if np.array_equal(chunk, actions[i])] for chunk in batch.actions]
    assert [bool(source) for source in sources] == [False] * 4 + [True] * 4
    for row in range(4, 8):
        (sample,) = sources[row]
        assert batch.rewards[row] == sample % 2
        assert batch.bootstrap[row] == pytest.approx(0.0 if sample % 2 else 0.9**CHUNK)
        following = batch.following.take(np.array([row]))
        expected = obs.take(np.array([min(sample + 1, 5) if sample % 2 == 0 else sample]))
        assert np.array_equal(following.state, expected.state)


# ------------------------------------------------------------------------------------------------------- takeovers

POLICY, PERSON = int(ActionSource.POLICY), int(ActionSource.PERSON)


def with_source(transitions, source):
    return attrs.evolve(transitions, source=np.array(source, np.int8))


def test_a_takeover_ends_the_policys_episode_without_further_reward():
    """Six chunks: the third leads to a chunk that a person begins, within the fifth a person takes over again."""
    ones = transitions_of(6, rewards=lambda actions: np.ones((6, CHUNK), np.float32))
    source = [[POLICY] * 2, [POLICY] * 2, [POLICY] * 2, [PERSON, POLICY], [POLICY, PERSON], [PERSON] * 2]
    ended = ended_by_takeovers(with_source(ones, source))
    assert ended.terminated.tolist() == [False, False, True, False, True, True]
    assert ended.rewards.tolist() == [[1, 1], [1, 1], [1, 1], [1, 1], [1, 0], [1, 1]]
    assert ended_by_takeovers(ones) is ones
    again = ended_by_takeovers(with_source(ones, [[PERSON, POLICY], [PERSON] * 2, *[[POLICY] * 2] * 4]))
    assert again.terminated.tolist() == [True, False, False, False, False, True], "what the person began, it gave back"


def test_what_was_not_executed_is_not_a_takeover():
    ones = transitions_of(2, rewards=lambda actions: np.ones((2, CHUNK), np.float32))
    cut = attrs.evolve(ones, valid=np.array([[True, True], [True, False]]))
    source = with_source(cut, [[POLICY] * 2, [POLICY, PERSON]])
    assert ended_by_takeovers(source).terminated.tolist() == [False, True]
    assert ended_by_takeovers(source).rewards.tolist() == ones.rewards.tolist()
    assert find_corrections(source).tolist() == []
    assert find_corrections(with_source(cut, [[POLICY] * 2, [PERSON, POLICY]])).tolist() == [1]
    repeated = with_last_action_repeated(cut).actions
    assert np.array_equal(repeated[0], ones.actions[0]) and np.array_equal(repeated[1], ones.actions[1, [0, 0]])


def taken_over_data(step, seed=0):
    transitions = transitions_of(6, seed=seed)
    source = np.array([[POLICY] * 2, [PERSON] * 2] * 3, np.int8)
    frames = attrs.evolve(transitions.frames, steps=None)
    return TransitionsData(
        step=step,
        version=step - 1,
        transitions=attrs.evolve(transitions, source=source, frames=frames),
        demonstrations=recording_of(),
    )


@pytest.mark.parametrize("features", ["trained", "frozen"])
def test_chunks_of_whoever_took_over_count_as_demonstrations(tmp_path, features):
    demonstrations = DemonstratedShare(share=0.75, corrections=True)
    keys = {"demonstrations": demonstrations, "features": features, "min_data": 100}
    trainer = trainer_in(tmp_path / "run", info=WITH_TAKEOVERS, **keys)
    for step in (1, 2):
        sums = trainer.update(taken_over_data(step, seed=step)).sums
    assert sums["off_policy/corrections"] == 6
    by_person = [taken_over_data(step, seed=step).transitions.actions[[1, 3, 5]] for step in (1, 2)]
    known = [*np.concatenate(by_person), *recording_of().read_samples(np.arange(6))[1]]
    drawn = np.concatenate([trainer._draw_batch(number).actions[2:] for number in range(1, 41)])
    counts = [sum(np.array_equal(chunk, action) for chunk in drawn) for action in known]
    assert sum(counts) == len(drawn) and min(counts) > 5, "each comes from a person or a recording, with equal chances"

    other = trainer_in(tmp_path / "run", info=WITH_TAKEOVERS, **keys)
    load_owned_state(other, owned_state(trainer), "the checkpoint")
    for each in (trainer, other):
        each.update(taken_over_data(3, seed=3))
    assert len(trainer._corrections) == 9
    for number in range(1, 5):
        assert np.array_equal(other._draw_batch(number).actions, trainer._draw_batch(number).actions)


def test_corrections_that_the_buffer_forgot_are_not_drawn(tmp_path):
    demonstrations = DemonstratedShare(share=0.5, corrections=True)
    trainer = trainer_in(tmp_path, info=WITH_TAKEOVERS, demonstrations=demonstrations, min_data=8, capacity=8, lr=1e-3)
    for step in (1, 2, 3):
        trainer.update(taken_over_data(step, seed=step))
    assert trainer._corrections == [11, 13, 15, 17]


def test_cloning_of_demonstrations_pulls_the_policy_towards_them(tmp_path):
    def error(trainer):
        obs, actions = recording_of().read_samples(np.arange(6))
        with torch.no_grad():
            features = trainer._trained.policy_features(obs.numpy())
            likeliest, _ = trainer._sample_actions(features, torch.zeros(actions.shape))
            return float(
                (trainer._inputs.scale_actions(likeliest) - trainer._inputs.scale_actions(torch.as_tensor(actions)))
                .square()
                .mean()
            )

    errors = {}
    for weight in (0.0, 100.0):
        demonstrations = DemonstratedShare(share=0.5, cloning=weight)
        trainer = trainer_in(tmp_path / str(weight), demonstrations=demonstrations, micro_batch=3, updates_per_step=20)
        before = error(trainer)
        data = data_of(1, 6, demonstrations=recording_of())
        frames = attrs.evolve(data.transitions.frames, steps=None)
        sums = trainer.update(attrs.evolve(data, transitions=attrs.evolve(data.transitions, frames=frames))).sums
        errors[weight] = error(trainer)
    assert errors[100.0] < 0.9 * before and errors[100.0] < errors[0.0]
    assert 0 < sums["off_policy/demonstration_cloning"] < before


def test_keys_about_takeovers_are_refused_without_takeovers(tmp_path):
    for keys in ({"takeovers": "end"}, {"demonstrations": DemonstratedShare(share=0.5, corrections=True)}):
        with pytest.raises(UserError, match="simulators with takeovers"):
            trainer_in(tmp_path, **keys)


# ---------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("features", ["trained", "frozen"])
def test_a_resumed_trainer_equals_an_uninterrupted_one(tmp_path, features):
    """With pinned data: the process is killed after one more step than its checkpoint holds."""
    keys = {"updates_per_step": 2.0, "capacity": 12, "features": features}
    through = trainer_in(tmp_path / "through", **keys)
    killed = trainer_in(tmp_path / "killed", **keys)
    for step in (1, 2, 3):
        for trainer in (through, killed):
            trainer.update(data_of(step, 5, seed=step))
    saved = copy.deepcopy(owned_state(killed))
    policy = copy.deepcopy(killed._trained.model.module.state_dict())
    optimizer = copy.deepcopy(killed._trained.optimizer.state_dict())
    killed.update(data_of(4, 5, seed=99))
    resumed = trainer_in(tmp_path / "killed", **keys)
    resumed._trained.model.module.load_state_dict(policy)
    resumed._trained.optimizer.load_state_dict(optimizer)
    load_owned_state(resumed, saved, "the checkpoint")
    for step in (4, 5, 6):
        results = [trainer.update(data_of(step, 5, seed=step)).sums for trainer in (through, resumed)]
        assert results[0] == results[1]
    assert not differences(weights_of(through), weights_of(resumed))


def test_a_checkpoint_without_its_files_is_refused(tmp_path):
    trainer = trainer_in(tmp_path)
    trainer.update(data_of(1, 6))
    saved = owned_state(trainer)
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match="is not there: the checkpoint needs the replay buffer"):
        load_owned_state(trainer_in(tmp_path), saved, "the checkpoint")


# -------------------------------------------------------------------------------------------------------- bad input


def test_a_model_without_features_or_gradients_of_actions_is_refused(tmp_path):
    class Plain(VLAModel):
        sample_chunk = chunk_log_probs = imitation_loss = save = lambda self: None
        module = torch.nn.Linear(2, 2)

    with pytest.raises(UserError, match=r"policy's features, and model 'tiny' gives none \(no vla_rl.HasFeatures"):
        trainer_in(tmp_path, Plain())
    with pytest.raises(UserError, match="actions with a gradient, and model 'tiny' gives none"):
        trainer_in(tmp_path, LinearModel(INFO, CHUNK))


def test_demonstrations_of_another_action_space_are_refused(tmp_path):
    for recording, text in (
        (
            recording_of(action_dim=3),
            "chunks of 2 actions of 3 numbers, the simulator and rollout.chunk ask for 2 of 2",
        ),
        (recording_of(scale=9.0), "actions of another space: number"),
        (InMemoryDataset([recording_of().read_samples(np.arange(6))]), "needs demonstrations with rewards"),
        (None, "takes demonstrations into each batch .*, and there are none"),
    ):
        with pytest.raises(UserError, match=text):
            trainer_in(tmp_path, demonstrations=DemonstratedShare(share=0.5)).update(
                data_of(1, 6, demonstrations=recording)
            )


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"updates_per_step": 0.0}, "0 updates for each transition cannot be made: SAC makes 1"),
        ({"updates_per_step": math.nan}, "nan updates"),
        ({"critics": 2, "target_critics": 3}, "3 of 2 critics cannot be drawn"),
        ({"temperature": 0.0}, "'temperature' must be > 0"),
        ({"min_data": 10, "capacity": 9}, "fewer than min_data"),
        ({"cloning": -1.0}, "cloning"),
        ({"cloning": math.nan}, "cloning"),
    ],
)
def test_keys_that_make_no_sense_are_refused(keys, text):
    with pytest.raises(ValueError, match=text):
        OffPolicyConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"temperature": 0.1, "target_entropy": -3.0}, r"target_entropy: unknown key; now temperature: \{learned: "),
        ({"temperature": {"initial": 2.0}}, "temperature.initial: unknown key"),
        ({"temperature": True}, "temperature: expected float or a mapping with keys of (learned), got bool True"),
        ({"demonstrations": 0.5}, "demonstrations: expected a mapping with keys of (share, corrections, cloning)"),
        ({"demonstrations": {"corrections": True}}, "demonstrations.share: required, but missing"),
        ({"demonstrations": {"share": 1.0}}, "demonstrations.share: 'share' must be < 1.0"),
        (
            {"demonstration_cloning": 1.0},
            "demonstration_cloning: unknown key; now demonstrations: {share: ..., cloning",
        ),
    ],
)
def test_keys_that_contradict_cannot_be_written(keys, text):
    with pytest.raises(Problems, match=text.replace("(", r"\(").replace(")", r"\)")):
        Structurer().read_class(keys, OffPolicyConfig)


def test_several_learners_are_refused(tmp_path):
    trainer = trainer_in(tmp_path)
    trainer._trained.strategy.world = 2
    with pytest.raises(UserError, match="on one learner"):
        trainer.update(data_of(1, 6))


def test_numbers_that_are_not_finite_leave_the_policy_as_it_is(tmp_path):
    trainer = trainer_in(tmp_path)
    before = {name: t for name, t in weights_of(trainer).items() if not name.startswith("targets")}

    def infinite(actions):
        return np.full(actions.shape[:2], math.inf, np.float32)

    with pytest.raises(UserError, match="not finite in step 1; the weights are unchanged"):
        trainer.update(data_of(1, 6, rewards=infinite))
    assert not differences(before, weights_of(trainer))
