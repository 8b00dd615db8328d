"""A public folder against what is built from it: parts that are not read, statistics of other units, adapters alone."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from openvla_cases import CHUNK, ENV, policy

from vla_rl.core.contexts import CheckContext, ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.spec.structure import Problems
from vla_rl.plugins.models import openvla
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    policy().save(folder)
    return folder


def test_a_gripper_of_other_units_is_warned_of(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it is not scaled: 0 and 1 in the data, -1 and 1 in the simulator."""
    copytree(saved, tmp_path / "rlds")
    stats = json.loads((tmp_path / "rlds" / "dataset_statistics.json").read_text())
    stats["simulator"]["action"] |= {"q01": [-1.0, -1.0, 0.0], "q99": [1.0, 1.0, 1.0], "mask": [True, True, False]}
    (tmp_path / "rlds" / "dataset_statistics.json").write_text(json.dumps(stats))
    policy(checkpoint=str(tmp_path / "rlds"), gripper="rlds")
    assert not caplog.records
    policy(checkpoint=str(tmp_path / "rlds"))
    assert "dimension 2 ranges from 0 to 1, the simulator takes -1 to 1" in caplog.text
    assert "set model.gripper: rlds if it is a gripper" in caplog.text


# ------------------------------------------------------------------------------------------ parts besides the network


@pytest.mark.parametrize(
    ("part", "config", "message"),
    [
        ("vision_backbone", {}, "vision_backbone--150000_checkpoint.pt holds vision transformers with FiLM layers"),
        ("noisy_action_projector", {}, "the input of OpenVLA-OFT's diffusion head"),
        ("gripper_head", {}, "a part that is not known here.*known are: action_head, proprio_projector"),
        ("proprio_projector", {"plugin": openvla.openvla}, "set model.type: openvla_oft"),
    ],
)
def test_parts_that_are_not_read(saved: Path, tmp_path: Path, part: str, config: dict[str, Any], message: str) -> None:
    plugin = config.get("plugin", openvla.openvla_oft)
    chunk = CHUNK
    if plugin is openvla.openvla:
        plugin.build(plugin.config(preset="fast"), ModelContext(env=ENV)).save(tmp_path / "x")
        chunk = 1
    else:
        copytree(saved, tmp_path / "x")
    given = plugin.config(checkpoint=str(tmp_path / "x"))
    plugin.check(given, CheckContext(chunk=chunk))
    torch.save({}, tmp_path / "x" / f"{part}--150000_checkpoint.pt")
    with pytest.raises(CheckpointError, match=message):
        plugin.build(given, ModelContext(env=ENV, chunk=chunk))
    with pytest.raises(Problems, match=message):
        plugin.check(given, CheckContext(chunk=chunk))


def test_a_diffusion_head_is_not_an_l1_head(tmp_path: Path) -> None:
    policy(head="l1").save(tmp_path)
    torch.save({"module.noise_predictor.x": torch.zeros(1)}, tmp_path / "action_head--latest_checkpoint.pt")
    with pytest.raises(CheckpointError, match=r"action_head--latest_checkpoint.pt is OpenVLA-OFT's diffusion head"):
        policy(checkpoint=str(tmp_path), head="l1")


ENDS = {"min": [-0.5, -0.9, -1.0], "max": [0.5, 0.9, 0.5], "q01": [-0.1] * 3, "q99": [0.1] * 3}


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("aloha1_fold", ENDS, "'aloha1_fold' of .* are of ALOHA.*statistics_range: min_max"),
        ("robot", {name: ENDS[name] for name in ("min", "max")}, "'robot' of .* have no q01 and no q99"),
        ("robot", {name: [values[0]] * 14 for name, values in ENDS.items()}, "are of 14 numbers, as ALOHA's"),
        ("robot", ENDS, ""),
    ],
)
def test_statistics_that_may_be_scaled_by_their_ends(
    saved: Path, tmp_path: Path, key: str, entry: dict[str, Any], message: str
) -> None:
    """A public folder does not say which are meant; OpenVLA-OFT goes by the name of the script."""
    copytree(saved, tmp_path / "x")
    raw = json.loads((tmp_path / "x" / "config.json").read_text()) | {"policy_setup": {}}
    (tmp_path / "x" / "config.json").write_text(json.dumps(raw))
    proprio = {"min": [-3.0] * 4, "max": [3.0] * 4, "q01": [-1.0] * 4, "q99": [1.0] * 4}
    (tmp_path / "x" / "dataset_statistics.json").write_text(json.dumps({key: {"action": entry, "proprio": proprio}}))
    given = OpenVLAOFTConfig(checkpoint=str(tmp_path / "x"))
    if message:
        with pytest.raises(Problems, match=message) as error:
            openvla.openvla_oft.check(given, CheckContext(chunk=CHUNK))
        assert error.value.items[0][0] == ("statistics_range",)
        with pytest.raises(CheckpointError, match=message):
            policy(checkpoint=str(tmp_path / "x"))
    else:
        openvla.openvla_oft.check(given, CheckContext(chunk=CHUNK))
    if len(entry["max"]) != ENV.action_dim:
        return
    model = policy(checkpoint=str(tmp_path / "x"), statistics_range="min_max")
    restored = model.codec.restore_actions(torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(restored, torch.tensor([[-0.5, 0.0, 0.5]]))
    state = model._parts.state_scaler.normalise_values(torch.tensor([[-3.0, 0.0, 1.5, 9.0]]), clip=True)
    torch.testing.assert_close(state, torch.tensor([[-1.0, 0.0, 0.5, 1.0]], dtype=torch.float64), rtol=0, atol=1e-6)
    model.save(tmp_path / "again")  # which says it
    highest = policy(checkpoint=str(tmp_path / "again")).codec.restore_actions(torch.ones(1, 3, dtype=torch.float64))
    torch.testing.assert_close(highest, torch.tensor([entry["max"]]))


def test_an_adapter_that_was_not_merged(tmp_path: Path) -> None:
    inner = tmp_path / "run" / "lora_adapter"
    inner.mkdir(parents=True)
    (inner / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "openvla/openvla-7b"}))
    command = f"--base_checkpoint openvla/openvla-7b --lora_finetuned_checkpoint_dir {tmp_path / 'run'}\n"
    for folder in (inner, inner.parent):
        with pytest.raises(CheckpointError, match=command):
            policy(checkpoint=str(folder))
