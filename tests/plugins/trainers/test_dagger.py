"""`dagger` and `hg_dagger`: schedules, labels, one update by hand, warnings, and bad input."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import Transitions, TransitionsData
from vla_rl.core.types import ActionSource
from vla_rl.plugins.trainers.dagger.config import DaggerConfig, HGDaggerConfig, decay_beta
from vla_rl.plugins.trainers.dagger.impl import Dagger, HGDagger
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.parallel import SingleRank
from vla_rl.toolkit.trainers.trained_model import TrainedModel

CHUNK = 3
INFO = attrs.evolve(synthetic.env_info(cameras=1, pixels=8), takeovers=True)
POLICY, PERSON = ActionSource.POLICY, ActionSource.PERSON


def trainer_in(folder, kind=Dagger, info=INFO, strategy=None, **keys):
    train = TrainSpec(steps=1, lr=1e-2, micro_batch=8, max_grad_norm=None)
    trained = TrainedModel(LinearModel(info, CHUNK), train, name="linear", device="cpu", info=info, acting=True)
    if strategy is not None:
        trained.strategy = strategy
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=None, heartbeat=lambda: None, folder=folder)
    config = {Dagger: DaggerConfig, HGDagger: HGDaggerConfig}[kind](**{"updates": 2, "batch": 8, **keys})
    return kind(config, training)


def actions_of(count, seed):
    low, high = np.array(INFO.action_low, np.float32), np.array(INFO.action_high, np.float32)
    draws = np.random.default_rng(seed)
    return low + (high - low) * draws.random((count, CHUNK, INFO.action_dim), np.float32)


def transitions_of(count, seed=0, source=None, valid=None):
    return Transitions(
        frames=synthetic.observation(INFO, count + 1, seed=seed),
        first=np.arange(count),
        following=np.arange(1, count + 1),
        actions=actions_of(count, seed),
        rewards=np.zeros((count, CHUNK), np.float32),
        valid=np.ones((count, CHUNK), bool) if valid is None else valid,
        terminated=np.arange(count) == count - 1,
        source=source,
        expert_actions=actions_of(count, seed + 100),
    )


def data_of(transitions, step=1, demonstrations=None):
    return TransitionsData(step=step, version=step - 1, transitions=transitions, demonstrations=demonstrations)


def recording_of(count, actions=None, pixels=8):
    info = synthetic.env_info(cameras=1, pixels=pixels)
    return InMemoryDataset(
        [(synthetic.observation(info, count, seed=9), actions_of(count, 9) if actions is None else actions)]
    )


# ----------------------------------------------------------------------------------------------------- schedule


def test_the_probability_of_the_expert_decays():
    """Ross et al. 2011, section 3.1: beta_1 = 1, and beta_i = p^(i - 1), or 1 in the first iteration alone."""
    assert [decay_beta(DaggerConfig(), step) for step in (1, 2, 3)] == [1.0, 0.0, 0.0]
    decaying = DaggerConfig(beta=0.8, beta_decay=0.5)
    assert [decay_beta(decaying, step) for step in (1, 2, 4)] == pytest.approx([0.8, 0.4, 0.1])
    assert [decay_beta(DaggerConfig(beta=0.3, beta_decay=1.0), step) for step in (1, 9)] == [0.3, 0.3]


@pytest.mark.parametrize(
    "keys", [{"beta": 1.5}, {"beta": -0.1}, {"beta_decay": 2.0}, {"updates": 0}, {"batch": 0}, {"capacity": 0}]
)
def test_keys_out_of_range_are_refused(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        DaggerConfig(**keys)


# ------------------------------------------------------------------------------------------------------- updates


def test_an_update_clones_the_labels_of_all_iterations(tmp_path):
    """Adam on the imitation loss of samples drawn from demonstrations and all labels, by hand."""
    trainer = trainer_in(tmp_path)
    recording = recording_of(5)
    model = LinearModel(INFO, CHUNK)
    by_hand = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    batches = []
    parts = [recording.read_samples(np.arange(5))]
    number = 0
    for step, count in ((1, 4), (2, 6)):
        transitions = transitions_of(count, seed=step)
        metrics = trainer.update(data_of(transitions, step, recording)).sums
        parts.append((transitions.frames.take(np.arange(count)), transitions.expert_actions))
        aggregate = InMemoryDataset(parts)
        losses = []
        for _ in range(2):
            number += 1
            batches.append(np.sort(generator(0, "dagger/batch", number).integers(0, aggregate.num_samples(), 8)))
            obs, actions = aggregate.read_samples(batches[-1])
            by_hand.zero_grad()
            loss = model.imitation_loss(obs, actions)
            loss.backward()
            by_hand.step()
            losses.append(loss.item())
        assert metrics["loss/imitation"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert metrics["dagger/labelled"] == count and metrics["dagger/updates"] == 2
        assert metrics["dagger/samples"] == aggregate.num_samples()
    assert len(np.unique(np.concatenate(batches))) > 8
    trained = trainer.modules()["policy"].state_dict()
    assert all(torch.allclose(trained[name], p, atol=1e-6) for name, p in model.module.state_dict().items())


def test_only_chunks_of_a_takeover_are_cloned(tmp_path):
    """Rows: the policy's; taken over within; given back within; a person's; a person's, which ended the episode after
    one action; the policy's, after which nothing counts."""
    o, x = POLICY, PERSON
    source = np.array([[o, o, o], [o, x, x], [x, x, o], [x, x, x], [x, o, o], [o, o, o]], np.int8)
    valid = np.ones((6, CHUNK), bool)
    valid[4:, 1:] = False
    trainer = trainer_in(tmp_path, HGDagger)
    transitions = transitions_of(6, source=source, valid=valid)
    chosen, labels = trainer.select_labelled(transitions)
    assert chosen.tolist() == [3, 4]
    assert np.array_equal(labels[0], transitions.actions[3])
    assert np.array_equal(labels[1], np.repeat(transitions.actions[4, :1], CHUNK, axis=0)), "repeats the last action"
    metrics = trainer.update(data_of(transitions)).sums
    assert metrics["hg_dagger/labelled"] == metrics["hg_dagger/samples"] == 2 and metrics["hg_dagger/updates"] == 2


def test_an_expert_that_takes_over_counts_as_a_person(tmp_path):
    source = np.full((2, CHUNK), ActionSource.EXPERT, np.int8)
    chosen, _ = trainer_in(tmp_path, HGDagger).select_labelled(transitions_of(2, source=source))
    assert chosen.tolist() == [0, 1]


def test_a_rollout_without_takeovers(tmp_path):
    """A warning once, and nothing is trained; with demonstrations those are cloned."""
    trainer = trainer_in(tmp_path / "alone", HGDagger)
    results = [trainer.update(data_of(transitions_of(2, step), step)) for step in (1, 2)]
    assert "no takeover covered a whole chunk" in results[0].warnings[0] and not results[1].warnings
    assert [result.sums["hg_dagger/updates"] for result in results] == [0, 0]
    policies_own = np.full((2, CHUNK), POLICY, np.int8)
    with_recording = trainer_in(tmp_path / "other", HGDagger)
    result = with_recording.update(data_of(transitions_of(2, source=policies_own), demonstrations=recording_of(5)))
    assert result.sums["hg_dagger/samples"] == 5 and result.sums["hg_dagger/updates"] == 2


def test_no_warning_after_a_takeover(tmp_path):
    trainer = trainer_in(tmp_path, HGDagger)
    person = np.full((2, CHUNK), PERSON, np.int8)
    first = trainer.update(data_of(transitions_of(2, source=person)))
    second = trainer.update(data_of(transitions_of(2, 1), 2))
    assert not first.warnings and not second.warnings and second.sums["hg_dagger/updates"] == 2


def test_only_the_newest_labels_are_kept(tmp_path):
    trainer = trainer_in(tmp_path, capacity=5)
    samples = [trainer.update(data_of(transitions_of(4, step), step)).sums["dagger/samples"] for step in (1, 2, 3)]
    assert samples == [4, 5, 5]


# ----------------------------------------------------------------------------------------------------- bad input


def test_demonstrations_of_another_action_space_are_refused(tmp_path):
    with pytest.raises(UserError, match="actions of another space: number 0 goes up to"):
        trainer_in(tmp_path).update(
            data_of(transitions_of(2), demonstrations=recording_of(3, 50 * (1 + actions_of(3, 0))))
        )
    with pytest.raises(UserError, match="have chunks of 2 actions of"):
        trainer_in(tmp_path).update(data_of(transitions_of(2), demonstrations=recording_of(3, actions_of(3, 0)[:, :2])))


def test_demonstrations_with_other_images_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"images of 16 x 16 pixels for camera .* and the simulator 8 x 8"):
        trainer_in(tmp_path).update(data_of(transitions_of(2), demonstrations=recording_of(3, pixels=16)))


def test_labels_have_to_be_there(tmp_path):
    unlabelled = attrs.evolve(transitions_of(2), expert_actions=None)
    with pytest.raises(UserError, match="labels of the simulator's expert, which was not asked"):
        trainer_in(tmp_path).update(data_of(unlabelled))


def test_a_simulator_without_takeovers_is_refused(tmp_path):
    with pytest.raises(UserError, match="this simulator has none"):
        trainer_in(tmp_path, HGDagger, info=attrs.evolve(INFO, takeovers=False))


class TwoRanks(SingleRank):
    world = 2


def test_one_learner_with_a_run_folder_is_needed(tmp_path):
    with pytest.raises(UserError, match="keeps its labels on one learner; place one"):
        trainer_in(tmp_path, strategy=TwoRanks()).update(data_of(transitions_of(2)))
    with pytest.raises(UserError, match="trainer 'hg_dagger' keeps labels in the run folder"):
        trainer_in(None, HGDagger)
