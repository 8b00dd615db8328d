"""A checkpoint acts without its simulator, as it does in an evaluation."""

from __future__ import annotations

import json
import shutil

import attrs
import numpy as np
import pytest
import torch
from trained import sight, spec, train

import vla_rl
from vla_rl.core.errors import CheckpointError, PluginError, SpecError, UserError
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.runtime.run_folder.env_info import read_env_info, write_env_info
from vla_rl.runtime.start import start


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def policy(run):
    return vla_rl.open_policy(run)


def test_what_a_checkpoint_says_of_the_simulator_is_exact(run, tmp_path):
    driver = start(parse_spec(spec()))
    driver.workers.close()
    assert read_env_info(run / "checkpoints" / "last") == driver.info
    odd = EnvInfo(
        cameras={"b": (3, 4), "a": (np.int64(5), 6)},
        state_dim=0,
        action_low=(-0.1, np.float32(0.1), -float("inf")),
        action_high=(1 / 3, 1e300, float("inf")),
        tasks=(TaskInfo(name="t", instruction='say "é"', max_steps=7, instruction_varies=True),),
        notes=("n",),
        deterministic=False,
        action_names=("x", "y", "grip"),
        state_names=("joint",),
    )
    write_env_info(tmp_path, odd)
    found = read_env_info(tmp_path)
    assert found == odd and list(found.cameras) == ["b", "a"]


def test_it_acts_as_the_model_of_the_run(run, policy):
    """The same weights, which are not those that it began with, and the same arithmetic."""
    driver = start(parse_spec(spec()))
    try:
        driver.learners.load(run / "checkpoints" / "last" / "trainer")
        model = driver.backend.worker.roles["policy"].engine.model
        weights = dict(model.weights())
        assert all(torch.equal(weights[name], tensor) for name, tensor in policy.engine.model.weights())
        for seed in range(5):
            seen = sight(policy, seed)
            obs = policy.observation(seen["images"], seen["state"], seen["instruction"])
            chunk = model.sample_chunk(obs, Noise(0, "any", [0], [0], [0]), True)
            assert np.array_equal(policy.act(**seen), chunk.actions[0].numpy())
    finally:
        driver.workers.close()


def test_no_simulator_is_loaded(run, fork_server):
    code = (
        "import sys; sys.modules['vla_rl.plugins.envs.tabletop.simulator'] = None; import vla_rl, numpy as np;"
        f"policy = vla_rl.open_policy({str(run)!r});"
        "images = {name: np.zeros((*size, 3), np.uint8) for name, size in policy.info.cameras.items()};"
        "print(policy.act(images, np.zeros(policy.info.state_dim), 'push').shape)"
    )
    done = fork_server.run_python("-c", code)
    assert done.stdout == "(4, 3)\n", done.stderr


def test_noise_is_keyed(run):
    policy = vla_rl.open_policy(run, greedy=False)
    seen = sight(policy, 0)
    first = policy.act(**seen, key=(1, 2, 3))
    assert not np.array_equal(first, policy.act(**seen, key=(1, 2, 4)))
    assert np.array_equal(first, policy.act(**seen, key=(1, 2, 3)))
    assert not np.array_equal(policy.act(**seen), policy.act(**seen))


def test_rows_of_a_batch_are_what_each_is_alone(policy):
    seen = [sight(policy, seed) for seed in range(8)]
    rows = [policy.observation(**one) for one in seen]
    together = policy.act_on(vla_rl.Observation.concat(rows), [(n, 0, 0) for n in range(8)])
    assert np.array_equal(together, [policy.act(**one) for one in seen])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": {}}, "no image of camera 'overhead'; there are: -"),
        ({"images": {"overhead": np.zeros((8, 16, 3), np.uint8)}}, r"uint8 \[8, 16, 3\]; .* uint8 \[16, 16, 3\]"),
        ({"images": {"overhead": np.zeros((16, 16, 3))}}, r"float64 \[16, 16, 3\]"),
        ({"state": [1.0]}, r"shape \[1\]; it must be 4 numbers"),
        ({"state": None}, r"shape \[\]; it must be 4"),
        ({"state": "home"}, "'home'; it must be 4"),
        ({"state": [0, 0, float("nan"), 0]}, "not finite"),
        ({"instruction": None}, "instruction is none; it must be a text"),
        ({"instruction": "x" * 1001}, "of 1 to 1000 characters"),
    ],
)
def test_what_it_was_not_trained_on_is_refused(policy, change, message):
    with pytest.raises(vla_rl.BadObservation, match=message):
        policy.act(**{**sight(policy, 0), **change})


@pytest.mark.parametrize(("number", "clipped"), [(1e9, 1), (-1e9, 1), (0.5, 0)])
def test_actions_stay_within_bounds(policy, number, clipped):
    sample = policy.engine.act
    policy.engine.__dict__["act"] = lambda *given: attrs.evolve(sample(*given), actions=torch.full((1, 4, 3), number))
    actions = policy.act(**sight(policy, 0))
    assert (actions <= policy.info.action_high).all() and (actions >= policy.info.action_low).all()
    assert (policy.clipped, policy.acted) == (clipped, 1)
    policy.engine.__dict__["act"] = lambda *given: attrs.evolve(
        sample(*given), actions=torch.full((1, 4, 3), float("nan"))
    )
    with pytest.raises(PluginError, match="not finite"):
        policy.act(**sight(policy, 0))


def test_what_cannot_be_opened_says_why(run, tmp_path):
    with pytest.raises(UserError, match="neither a run with a checkpoint nor"):
        vla_rl.open_policy(tmp_path)
    copy = shutil.copytree(run, tmp_path / "copy", symlinks=True)
    with pytest.raises(
        UserError, match=r"nowhere does not exist; give RUN, .*\n  runs with a checkpoint in .*: copy; "
    ):
        vla_rl.open_policy(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"step_000007 does not exist; .*\n  in .*checkpoints there are: step_000001; "):
        vla_rl.open_policy(copy / "checkpoints" / "step_000007")
    with pytest.raises(SpecError, match="unknown key"):
        vla_rl.open_policy(copy, overrides=["model.binss=3"])
    with pytest.raises(CheckpointError, match=r"learner.pt holds the weights of another model"):
        vla_rl.open_policy(copy, overrides=["model.bins=3"])
    checkpoint = copy / "checkpoints" / "step_000001"
    file = checkpoint / "env.json"
    file.write_text(file.read_text().replace('"state_dim": 4', '"state_dim": 5'))
    with pytest.raises(CheckpointError, match=r"damaged: env.json has other content"):
        vla_rl.open_policy(copy)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["env.json"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"env.json is missing, which says what the policy sees"):
        vla_rl.open_policy(copy)
