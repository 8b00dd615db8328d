"""Saved folders as lerobot's users get them: the same policy for our own reader, what lerobot's config.json says, and
what lerobot cannot express. `tests/tools/test_in_lerobot.py` lets lerobot itself act with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import noise

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.models import pi0, smolvla
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.checkpoints.lerobot_layout import UNKNOWN, build_config
from vla_rl.toolkit.models.flow.config import SteeringConfig
from vla_rl.toolkit.models.instructions import save_suffix
from vla_rl.toolkit.relative_actions import RelativeActions

ENV = synthetic.env_info(bounds=((-9.0, 9.0),))
CHUNK = 4
PLUGINS = {"pi0": pi0.plugin, "pi05": pi0.pi05, "smolvla": smolvla.plugin}
RELATIVE = RelativeActions(relative_to="state", dimensions=(0, 1))


def build(name: str, env: Any = ENV, **config: Any) -> Any:
    plugin = PLUGINS[name]
    keys = config if "checkpoint" in config else {"preset": "tiny", **config}
    return plugin.build(plugin.config(**keys), ModelContext(env=env, chunk=CHUNK))


def save_public(model: Any, folder: Path) -> Path:
    """Save a network as if its sizes were the public ones, which are too large for tests."""
    model.save(folder)
    (folder / "architecture.json").unlink()
    return folder


@pytest.mark.parametrize("actions", [None, RELATIVE], ids=["absolute", "relative"])
@pytest.mark.parametrize("name", PLUGINS)
def test_the_folder_comes_back(name: str, actions: Any, tmp_path: Path) -> None:
    model = build(name, actions=actions)
    model.save(tmp_path)
    sizes = (tmp_path / "architecture.json").read_text()
    (tmp_path / "architecture.json").unlink()
    text = build_config(tmp_path, {"denoise_steps": 3})
    assert json.loads(text)["n_action_steps"] == (CHUNK if actions is None else 1)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "architecture.json").write_text(sizes)
    again = build(name, checkpoint=str(tmp_path))
    obs = synthetic.observation(ENV, 3)
    for greedy in (True, False):
        ours, theirs = (m.sample_chunk(obs, noise(3), greedy) for m in (model, again))
        assert torch.equal(ours.actions, theirs.actions) and torch.equal(ours.log_probs, theirs.log_probs)


@pytest.mark.parametrize(("name", "key"), [("pi0", "num_inference_steps"), ("smolvla", "num_steps")])
def test_the_config_is_the_runs(name: str, key: str, tmp_path: Path) -> None:
    folder = save_public(build(name), tmp_path)
    saved = json.loads((folder / "config.json").read_text())
    assert json.loads(build_config(folder, {"denoise_steps": 3, "use_state": None})) == {**saved, key: 3}
    assert json.loads(build_config(folder, {})) == saved, "a spec without the key says nothing"
    elsewhere = {"load_vlm_weights": True, "use_peft": True}  # of lerobot's own folder that the training began from
    (folder / "config.json").write_text(json.dumps({**saved, **elsewhere}))
    assert json.loads(build_config(folder, {})) == {**saved, "load_vlm_weights": False, "use_peft": False}


def test_what_lerobot_cannot_do_is_refused(tmp_path: Path) -> None:
    def check_refused(folder: Path, message: str, **settings: Any) -> None:
        with pytest.raises(UserError, match=message) as caught:
            build_config(folder, settings)
        assert "\n" not in str(caught.value)

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "openvla"}')
    check_refused(tmp_path / "other", "is for pi0, pi05, smolvla; .* of type 'openvla', take --format own")
    model = build("pi0")
    model.save(tmp_path / "tiny")
    check_refused(tmp_path / "tiny", "its network has other sizes than the public ones")
    model.instruction_suffix = " Advantage: positive"
    save_suffix(model, save_public(model, tmp_path / "suffix"))
    check_refused(tmp_path / "suffix", "appends a text to every instruction, .* take --format own")
    steered = save_public(build("pi0", steering=SteeringConfig()), tmp_path / "steered")
    check_refused(steered, "a steering head chooses its initial noise")
    assert all(any((tmp_path / run / name).is_file() for run in ("tiny", "suffix", "steered")) for name in UNKNOWN)
    padded = save_public(build("pi05", state_in_prompt="padded"), tmp_path / "padded")
    check_refused(padded, "prompts hold a state padded with zeros")


def test_a_policy_that_sees_no_state(tmp_path: Path) -> None:
    """lerobot's pi0 and SmolVLA have an input for it; pi0.5 has it in its prompt, or not at all."""
    for name in ("pi0", "smolvla"):
        for folder, keys, settings in (("preset", {"use_state": False}, {}), ("spec", {}, {"use_state": False})):
            saved = save_public(build(name, **keys), tmp_path / name / folder)
            with pytest.raises(UserError, match="sees no state"):
                build_config(saved, settings)
    build_config(save_public(build("pi05", state_in_prompt="none"), tmp_path / "pi05"), {})


@pytest.mark.parametrize("name", PLUGINS)
def test_relative_actions_that_lerobot_has_no_words_for(name: str, tmp_path: Path) -> None:
    elsewhere = RelativeActions(relative_to="state", dimensions={0: 2})
    saved = save_public(build(name, actions=elsewhere), tmp_path / "elsewhere")
    with pytest.raises(UserError, match="relative to the state's at other places"):
        build_config(saved, {})
    short = synthetic.env_info(bounds=((-9.0, 9.0),), state_dim=2)
    saved = save_public(build(name, short, actions=RELATIVE), tmp_path / "short")
    with pytest.raises(UserError, match="have 3 numbers and are relative to a state of fewer"):
        build_config(saved, {})


@pytest.mark.parametrize(("before", "after"), [("exact", "none"), ("padded", "exact")])
def test_a_prompt_that_the_spec_changed(before: str, after: str, tmp_path: Path) -> None:
    """lerobot's own steps, which the folder brought along, say what the policy was trained with since."""
    build("pi05", state_in_prompt=before).save(tmp_path / "before")
    build("pi05", checkpoint=str(tmp_path / "before"), state_in_prompt=after).save(tmp_path / "after")
    steps = json.loads((tmp_path / "after" / "policy_preprocessor.json").read_text())["steps"]
    state, normaliser = "pi05_prepare_state_tokenizer_processor_step", "normalizer_processor"
    order = [step["registry_name"] for step in steps]
    assert (state in order) == (after == "exact")
    assert state not in order or order.index(normaliser) < order.index(state)
    assert build("pi05", checkpoint=str(tmp_path / "after")).state_in_prompt == after
