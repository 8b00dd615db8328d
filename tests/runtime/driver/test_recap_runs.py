"""`recap` in runs: a policy that reads its condition learns from good and bad chunks, and acts as a positive one wherever
its checkpoint is used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted_runs import read_metrics, scripted_spec

from vla_rl import export
from vla_rl.core.catalogue import load
from vla_rl.core.errors import CheckpointError, SpecError, UserError
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.trainers.recap.label import NEGATIVE
from vla_rl.runtime.driver.training.behaviour_cloning import ImitationTrainer
from vla_rl.runtime.run_folder.spec_file import load_run_spec
from vla_rl.runtime.start import clone, evaluate, run
from vla_rl.serving.policy import open_policy
from vla_rl.toolkit.models.instructions import without_suffix

HERE = Path(__file__).parent
PLUGINS = ["vla_rl.testing.scripted", str(HERE / "reading_model.py"), str(HERE / "training" / "reward_data.py")]
PLUGINS_OF_SLOTS = [*PLUGINS, "vla_rl.testing.slot_placement"]
TRAINER = {"type": "recap", "critic_steps": 10, "lr": 1e-3, "atoms": 21, "positive_share": 0.5}
SECTION = {"data": {"type": "rewarded"}, "trainer": TRAINER, "lr": 5e-2, "batch": 16, "report_every": 10, "steps": 70}
SUFFIX = load("trainer", "recap").instruction_suffix


def spec_of(model=None, **section):
    model = {"type": "reading", **(model or {})}
    return parse_spec(scripted_spec(plugins=PLUGINS, model=model, imitation={**SECTION, **section}))


def last(folder):
    return folder / "checkpoints" / "last"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recap") / "run"
    return folder, clone(spec_of(), folder)


def test_it_acts_on_the_better_actions(trained):
    folder, results = trained
    assert results["success"]["rate"] >= 0.95
    lines = [line for line in read_metrics(folder) if "loss/value" in line or "recap/positive" in line]
    assert lines[0]["loss/value"] > 0 and lines[0]["loss/imitation"] == 0
    assert lines[-1]["recap/positive"] == pytest.approx(0.5, abs=0.1) and lines[-1]["loss/imitation"] > 0


def test_a_checkpoint_keeps_the_condition_for_evaluation_and_serving(trained):
    folder, results = trained
    spec = load_run_spec(folder)
    assert json.loads((last(folder) / "model" / "instruction.json").read_text()) == {"suffix": SUFFIX}
    assert evaluate(spec, last(folder))["success"] == results["success"]
    policy = open_policy(folder)
    model = policy.engine.model
    assert model.instruction_suffix == SUFFIX
    info = policy.info
    images = {camera: np.zeros((*size, 3), np.uint8) for camera, size in info.cameras.items()}
    policy.act(images, np.ones(info.state_dim, np.float32), info.tasks[0].instruction)
    policy.act(images, np.ones(info.state_dim, np.float32), info.tasks[0].instruction + SUFFIX)
    assert model.read == {info.tasks[0].instruction + SUFFIX}
    obs = policy.observation(images, np.ones(info.state_dim, np.float32), info.tasks[0].instruction)
    chunk = model.sample_chunk(obs, Noise(0, "test", [0], [0], [0]), False)
    scores = model.chunk_log_probs(obs, chunk)
    torch.testing.assert_close(scores.log_probs, chunk.log_probs)
    with without_suffix(model):
        assert not torch.allclose(model.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs)


def test_the_card_of_an_exported_policy_has_the_condition_to_the_letter(trained, tmp_path):
    folder, _ = trained
    export(folder, tmp_path / "given")
    text = (tmp_path / "given" / "README.md").read_text()
    assert '```json\n" Advantage: positive"\n```' in text
    assert json.loads((tmp_path / "given" / "instruction.json").read_text()) == {"suffix": SUFFIX}


def test_without_the_condition_the_policy_is_another_one(trained):
    """What the tests above show is the work of the condition: with the other label the same weights fail."""
    folder, _ = trained
    file = last(folder) / "model" / "instruction.json"
    text = file.read_text()
    try:
        file.write_text(json.dumps({"suffix": NEGATIVE}))
        spec = spec_of({"checkpoint": str(last(folder) / "model")})
        assert evaluate(spec)["success"]["rate"] <= 0.3
    finally:
        file.write_text(text)


def test_a_model_folder_keeps_the_condition_for_other_runs(trained, tmp_path):
    """RL from the folder begins with the same policy, and its checkpoints have the condition again."""
    folder, results = trained
    spec = spec_of({"checkpoint": str(last(folder) / "model")})
    assert evaluate(spec)["success"] == results["success"]
    again = run(spec, tmp_path / "rl")
    assert again["success_before"] == results["success"]
    assert (last(tmp_path / "rl") / "model" / "instruction.json").is_file()


def test_plain_cloning_has_no_condition(tmp_path):
    section = {"trainer": {"type": "behaviour_cloning"}, "steps": 2}
    clone(spec_of(**section), tmp_path)
    assert not (last(tmp_path) / "model" / "instruction.json").exists()
    assert "instruction_suffix" not in torch.load(last(tmp_path) / "trainer" / "learner.pt", weights_only=True)


@pytest.mark.ray
def test_policies_in_other_workers_have_the_condition(tmp_path):
    """Two learners, which add up gradients of both networks, and a separate policy."""
    section = {**SECTION, "steps": 60}
    changes = {"runtime": {"backend": "ray"}, "placement": {"type": "slots", "learner": 2}}
    spec = scripted_spec(plugins=PLUGINS_OF_SLOTS, model={"type": "reading"}, imitation=section, **changes)
    results = clone(parse_spec(spec), tmp_path)
    assert results["success"]["rate"] >= 0.95
    assert evaluate(load_run_spec(tmp_path), last(tmp_path))["success"] == results["success"]


@pytest.mark.parametrize("stop", [5, 10, 30])
def test_a_resumed_run_equals_one_that_went_through(trained, tmp_path, monkeypatch, stop):
    """Stopped while the value function trains, between the two phases, and after the samples were labelled."""
    folder, _ = trained
    train = ImitationTrainer.train

    def stopped(self, first, last_step, rate, on_step):
        if first > stop:
            raise UserError("stopped")
        return train(self, first, last_step, rate, on_step)

    with monkeypatch.context() as patch:
        patch.setattr(ImitationTrainer, "train", stopped)
        with pytest.raises(UserError, match="stopped"):
            clone(spec_of(checkpoint_every=stop, report_every=5), tmp_path)
    clone(spec_of(), tmp_path, resume=True)
    states = [torch.load(last(f) / "trainer" / "learner.pt", weights_only=True) for f in (folder, tmp_path)]
    assert _flat(states[0]) == _flat(states[1])


def test_a_file_that_cannot_be_read_is_named(trained):
    folder, _ = trained
    file = last(folder) / "model" / "instruction.json"
    text = file.read_text()
    try:
        file.write_text("{}")
        with pytest.raises(CheckpointError, match=r"instruction\.json.*suffix"):
            evaluate(spec_of({"checkpoint": str(last(folder) / "model")}))
    finally:
        file.write_text(text)


@pytest.mark.parametrize("trainer", [TRAINER, {"type": "offline", "critic_steps": 10}])
def test_critics_alone_are_refused(trainer, tmp_path):
    with pytest.raises(SpecError, match=r"imitation\.trainer\.critic_steps: all 10 steps \(imitation\.steps\) train"):
        clone(spec_of(trainer=trainer, steps=10), tmp_path)


def _flat(state):
    """All numbers of a checkpoint, by their place."""
    if isinstance(state, dict):
        return {key: _flat(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_flat(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state
