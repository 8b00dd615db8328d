"""pi0 and pi0.5 written in openpi's layout, and read again: the same tensors, the same actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import noise
from pi0_cases import CHUNK, ENV, OPENPI_STATS, observation, openpi_folder, policy
from safetensors.torch import load_file, save_file

from reference_files import reference
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.plugins.models.pi0.builder import build_policy, state_text
from vla_rl.plugins.models.pi0.config import Pi05Config
from vla_rl.toolkit.models.checkpoints.openpi_layout import rename_tensors, write_openpi
from vla_rl.toolkit.models.prompts import train_tokenizer

QUANTILES = {
    "actions": {"mean": [0.0] * 3, "std": [1.0] * 3, "q01": [-0.5, -1.0, 0.0], "q99": [0.5, 1.0, 0.4]},
    "state": {"mean": [0.0] * 4, "std": [1.0] * 4, "q01": [-1.0, -2.0, 0.0, 0.5], "q99": [1.0, 2.0, 4.0, 0.5]},
}


def pi05(**config: Any) -> Any:
    return build_policy(Pi05Config(**config), ModelContext(env=ENV, chunk=CHUNK))


def actions(model: Any) -> torch.Tensor:
    return model.sample_chunk(observation(2), noise(2), False).actions


def stats(folder: Path, asset: str) -> dict[str, Any]:
    return json.loads((folder / "assets" / asset / "norm_stats.json").read_text())["norm_stats"]


@pytest.fixture
def pi05_folder(tmp_path) -> Path:
    """A checkpoint in openpi's layout, with the two files that our small networks need."""
    folder = openpi_folder(tmp_path / "given", reference("pi05", "model.safetensors"), None)
    tokenizer = train_tokenizer([t.instruction for t in ENV.tasks], lambda t: state_text(t, range(10)), 512)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "assets" / "libero").mkdir(parents=True)
    (folder / "assets" / "libero" / "norm_stats.json").write_text(json.dumps({"norm_stats": QUANTILES}))
    return folder


@pytest.mark.parametrize("told", ["exact", "none"])
def test_pi05_of_openpi_comes_back(pi05_folder, tmp_path, told):
    """Read, saved as lerobot has it, and written as openpi has it."""
    ours = pi05(checkpoint=str(pi05_folder), state_in_prompt=told)
    ours.save(tmp_path / "ours")
    write_openpi(tmp_path / "ours", tmp_path / "back", "libero")
    assert not list((tmp_path / "back").glob("policy_*"))
    same_tensors(pi05_folder, tmp_path / "back")
    found = stats(tmp_path / "back", "libero")
    for feature, entries in QUANTILES.items():
        for name in ("q01", "q99"):
            np.testing.assert_allclose(found[feature][name], entries[name][: len(found[feature][name])], atol=1e-6)
    again = pi05(checkpoint=str(tmp_path / "back"))
    assert again.state_in_prompt == told
    torch.testing.assert_close(actions(again), actions(ours), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "IDENTITY"])
def test_pi0_acts_the_same_whatever_scales_it(tmp_path, mode):
    given = openpi_folder(tmp_path / "given", reference("pi0", "model.safetensors"))
    policy(checkpoint=str(given)).save(tmp_path / "ours")
    if mode != "MEAN_STD":
        rescale(tmp_path / "ours", mode)
    write_openpi(tmp_path / "ours", tmp_path / "back", "physical-intelligence/libero")
    same_tensors(given, tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["precision"] == "float32" and (config["action_dim"], config["action_horizon"]) == (8, 10)
    ours, again = (policy(checkpoint=str(tmp_path / name)) for name in ("ours", "back"))
    torch.testing.assert_close(actions(again), actions(ours), rtol=0, atol=1e-5)
    if mode == "MEAN_STD":
        found = stats(tmp_path / "back", "physical-intelligence/libero")
        for feature, entries in OPENPI_STATS.items():
            for name, values in entries.items():
                kept = found[feature][name]  # without padding
                np.testing.assert_allclose(kept, values[: len(kept)], rtol=0, atol=1e-7)


def rescale(folder: Path, mode: str) -> None:
    """Let lerobot's files scale by another mode."""
    file = folder / "policy_preprocessor.json"
    content = json.loads(file.read_text())
    step = next(step for step in content["steps"] if step["registry_name"] == "normalizer_processor")
    step["config"]["norm_map"] |= {"ACTION": mode, "STATE": mode}
    file.write_text(json.dumps(content))
    ranges = {"action.min": [-1.0, -2.0, 0.0], "action.max": [1.0, 3.0, 0.5]}
    ranges |= {"observation.state.min": [-1.0] * 4, "observation.state.max": [1.0, 2.0, 3.0, -0.5]}
    save_file({name: torch.tensor(values) for name, values in ranges.items()}, folder / step["state_file"])


def same_tensors(first: Path, second: Path) -> None:
    old, new = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def test_names_change_and_bytes_do_not(tmp_path):
    tensors = {"model.a": torch.randn(3, 2).bfloat16(), "model.b.model.c": torch.arange(5, dtype=torch.float32)}
    save_file(tensors, tmp_path / "from.safetensors", metadata={"format": "pt"})
    assert rename_tensors(tmp_path / "from.safetensors", tmp_path / "to.safetensors") == "float32"
    found = load_file(tmp_path / "to.safetensors")
    assert found.keys() == {"a", "b.model.c"} and torch.equal(found["a"], tensors["model.a"])
    assert torch.equal(found["b.model.c"], tensors["model.b.model.c"])


def test_what_openpi_cannot_have_is_refused(pi05_folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"type": "smolvla"}')
    with pytest.raises(UserError, match="of pi0 and pi05; .* holds a model of type 'smolvla'"):
        write_openpi(tmp_path / "other", tmp_path / "to", "a")
    pi05(preset="tiny").save(tmp_path / "tiny")
    with pytest.raises(UserError, match=r"pads actions and state to \[3, 4\] numbers"):
        write_openpi(tmp_path / "tiny", tmp_path / "to", "a")
    pi05(checkpoint=str(pi05_folder), state_in_prompt="padded").save(tmp_path / "padded")
    with pytest.raises(UserError, match="hold a padded state"):
        write_openpi(tmp_path / "padded", tmp_path / "to", "a")
    pi05(checkpoint=str(pi05_folder), state_in_prompt="none").save(tmp_path / "ours")
    for name in ("../up", "/root", "."):
        with pytest.raises(UserError, match="cannot name statistics"):
            write_openpi(tmp_path / "ours", tmp_path / "to", name)
    (tmp_path / "ours" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(CheckpointError, match=r"cannot read .*model.safetensors"):
        write_openpi(tmp_path / "ours", tmp_path / "to", "a")
