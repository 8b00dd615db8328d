"""The store of labelled observations: what comes back, bounded files, exact resume, and the mixture with recordings."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from vla_rl.core.errors import UserError
from vla_rl.testing import synthetic
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.trainers.labelled_chunks import AggregatedDemonstrations, LabelledChunks

CHUNK = 3
INFO = synthetic.env_info(cameras=2, pixels=8)
RECORD_BYTES = 700
"""Above the size of a record: two images of 8 x 8 x 3, a state, a chunk."""


def samples_of(count, seed):
    actions = np.random.default_rng(seed).random((count, CHUNK, INFO.action_dim)).astype(np.float32)
    return synthetic.observation(INFO, count, seed=seed), actions


def store_in(folder, capacity=100, file_bytes=4 * RECORD_BYTES):
    return LabelledChunks(folder, INFO, CHUNK, capacity, file_bytes)


def same(one, other):
    (obs, actions), (other_obs, other_actions) = one, other
    same_images = all(np.array_equal(obs.images[name], other_obs.images[name]) for name in INFO.cameras)
    return (
        same_images
        and obs.instructions == other_obs.instructions
        and np.array_equal(obs.state, other_obs.state)
        and np.array_equal(actions, other_actions)
    )


def test_samples_come_back(tmp_path):
    store = store_in(tmp_path)
    one, other = samples_of(3, 1), samples_of(5, 2)
    store.add(*one)
    store.add(*other)
    assert len(store) == store.sample_count == 8
    assert same(store.read_labelled(np.arange(3)), one)
    assert same(store.read_labelled(np.array([7, 3])), (other[0].take(np.array([4, 0])), other[1][[4, 0]]))


def test_files_are_bounded(tmp_path):
    store = store_in(tmp_path, capacity=10)
    for seed in range(40):
        store.add(*samples_of(3, seed))
        store.state()
    assert len(store) == 10 and store.oldest_sample == 110
    assert same(store.read_labelled(np.arange(117, 120)), samples_of(3, 39))
    size = sum(file.stat().st_size for file in (tmp_path / "labels").iterdir())
    assert size <= 25 * RECORD_BYTES, "ten in the store, three more for the last two states, and parts of files"


def test_a_killed_process_continues_from_its_checkpoint(tmp_path):
    store = store_in(tmp_path / "run")
    store.add(*samples_of(6, 1))
    state = store.state()
    store.add(*samples_of(4, 2))  # after the checkpoint
    resumed = store_in(tmp_path / "run")
    resumed.load(state)
    assert resumed.sample_count == 6
    resumed.add(*samples_of(4, 3))
    assert same(resumed.read_labelled(np.arange(6, 10)), samples_of(4, 3))
    assert same(resumed.read_labelled(np.arange(6)), samples_of(6, 1))
    resumed.close()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match="is not there: the checkpoint needs"):
        store_in(tmp_path / "run").load(state)


@pytest.mark.parametrize("indices", [[0, 1], [5, 4], [4, 0, 6, 2, 4], []])
def test_recorded_demonstrations_come_first(tmp_path, indices):
    """Four recorded samples, then the three newest of five labelled ones."""
    recorded, labelled = samples_of(4, 1), samples_of(5, 2)
    store = store_in(tmp_path, capacity=3)
    store.add(*labelled)
    samples = AggregatedDemonstrations(InMemoryDataset([recorded]), store)
    assert samples.num_samples() == 7
    obs, actions = samples.read_samples(np.array(indices, np.int64))
    expected = np.concatenate([recorded[1], labelled[1][2:]])[indices]
    assert np.array_equal(actions, expected)
    states = np.concatenate([recorded[0].state, labelled[0].state[2:]])
    assert np.array_equal(obs.state, states[indices])


def test_without_recorded_ones_there_are_labels_alone(tmp_path):
    store = store_in(tmp_path)
    store.add(*samples_of(2, 5))
    samples = AggregatedDemonstrations(None, store)
    assert samples.num_samples() == 2
    assert same(samples.read_samples(np.arange(2)), samples_of(2, 5))
