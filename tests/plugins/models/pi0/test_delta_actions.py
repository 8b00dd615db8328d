"""Checkpoints whose actions are relative to the state, as openpi's `extra_delta_transform` makes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import noise
from pi0_cases import CHUNK, expert, observation, openpi_folder, policy

from reference_files import reference
from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import UnexecutedActions
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.models.pi0.statistics import check_checkpoint
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.fitting import MismatchError

WIDE = synthetic.env_info(bounds=((-99.0, 99.0),))
"""Nothing is clipped."""
RELATIVE = 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return openpi_folder(tmp_path / "openpi", reference("pi0", "model.safetensors"))


def test_actions_are_those_of_the_network_plus_the_state(folder):
    plain, relative = (policy(WIDE, checkpoint=str(folder), delta_actions=count) for count in (0, RELATIVE))
    obs = observation(3, WIDE)
    state = torch.as_tensor(obs.state)[:, None, :RELATIVE]
    for greedy in (True, False):
        before, after = (model.sample_chunk(obs, noise(3), greedy) for model in (plain, relative))
        assert torch.equal(before.log_probs, after.log_probs)
        assert torch.equal(after.actions[..., RELATIVE:], before.actions[..., RELATIVE:])
        torch.testing.assert_close(after.actions[..., :RELATIVE], before.actions[..., :RELATIVE] + state)
    assert torch.equal(relative.chunk_log_probs(obs, after).log_probs, after.log_probs)


def test_demonstrations_are_made_relative(folder, monkeypatch):
    monkeypatch.setattr("vla_rl.toolkit.models.flow_policy.crc32", lambda data: 0)  # noise depends on the actions
    plain, relative = (policy(WIDE, checkpoint=str(folder), delta_actions=count) for count in (0, RELATIVE))
    obs, actions = observation(3, WIDE), expert(3)
    absolute = actions.copy()
    absolute[..., :RELATIVE] += np.asarray(obs.state)[:, None, :RELATIVE]
    torch.testing.assert_close(relative.imitation_loss(obs, absolute), plain.imitation_loss(obs, actions))


def test_a_chunk_continues_in_the_simulators_units(folder):
    plain, relative = (policy(WIDE, checkpoint=str(folder), delta_actions=count) for count in (0, RELATIVE))
    obs = observation(2, WIDE)
    state = torch.as_tensor(obs.state)[:, :RELATIVE]
    left = expert(2)[:, :3]
    absolute = left.copy()
    absolute[..., :RELATIVE] += state.numpy()[:, None]
    before, after = (
        model.continue_chunk(obs, noise(2), True, [UnexecutedActions(actions=row, delay=1) for row in rows])
        for model, rows in ((plain, left), (relative, absolute))
    )
    torch.testing.assert_close(after[..., :RELATIVE], before[..., :RELATIVE] + state[:, None], rtol=1e-4, atol=1e-4)


def test_a_saved_folder_says_so(folder, tmp_path):
    model = policy(WIDE, checkpoint=str(folder), delta_actions=RELATIVE)
    model.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/delta_actions.json").read_text()) == {"delta_actions": RELATIVE}
    again = policy(WIDE, checkpoint=str(tmp_path / "saved"))
    obs = observation(2, WIDE)
    assert torch.equal(again.sample_chunk(obs, noise(2), True).actions, model.sample_chunk(obs, noise(2), True).actions)
    assert policy(WIDE, checkpoint=str(tmp_path / "saved"), delta_actions=0).delta_actions == 0


def test_relative_statistics_are_not_compared_with_the_simulators_range(tmp_path):
    """LIBERO's are outside it: the hand hangs upside down, and so turns by 3.1 relative to its own angle."""
    stats = {
        "actions": {"mean": [-3.1, -3.1, 0.3], "std": [0.1, 0.1, 0.2]},
        "state": {"mean": [0.0] * 4, "std": [1.0] * 4},
    }
    folder = openpi_folder(tmp_path / "far", reference("pi0", "model.safetensors"), stats)
    with pytest.raises(MismatchError, match="they belong to another robot or other units"):
        policy(checkpoint=str(folder))
    policy(checkpoint=str(folder), delta_actions=2)


def test_bad_settings_are_refused(folder):
    with pytest.raises(MismatchError, match="delta_actions: 5 is more than the 4 numbers of this simulator's state"):
        policy(WIDE, checkpoint=str(folder), delta_actions=5)
    with pytest.raises(ValueError, match="`delta_actions` says how to read a checkpoint"):
        Pi0Config(preset="tiny", delta_actions=2)
    config = Pi0Config(checkpoint=str(folder), delta_actions=2)
    with pytest.raises(Problems, match="delta_actions: with imitation.statistics: data"):
        check_checkpoint(config, CheckContext(chunk=CHUNK, scaling={}))
    check_checkpoint(config, CheckContext(chunk=CHUNK))
