"""Bases without statistics, cloned by those of the data: `sft` with `statistics: data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gr00t_cases import entry
from model_cases import noise
from pi0_cases import CHUNK, ENV, observation

from vla_rl.core.contexts import CheckContext, ModelContext
from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.spec.structure import Problems
from vla_rl.plugins.models import gr00t, openvla, pi0, smolvla
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.runtime.checks.run import check_spec

PART = {
    "mean": [0.0] * 4, "std": [1.0] * 4, "q01": [-0.8] * 4, "q99": [0.6] * 4, "min": [-0.9] * 4, "max": [0.9] * 4
}  # fmt: skip
SCALING = {"state": PART, "action": {name: values[:3] for name, values in PART.items()}}
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pi0": (pi0.plugin, {}),
    "pi05": (pi0.pi05, {}),
    "smolvla": (smolvla.plugin, {}),
    "gr00t": (gr00t.plugin, {}),
    "gr00t n1.7": (gr00t.plugin, {"preset": "tiny_n1_7"}),
    "openvla_oft": (openvla.openvla_oft, {}),
}


def edit(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def without_statistics(folder: Path, name: str) -> dict[str, Any]:
    """The folder as a base comes. -> keys of a spec that it then needs."""
    if name == "openvla_oft":
        (folder / "dataset_statistics.json").unlink()
        edit(folder / "config.json", norm_stats={})
    elif name == "gr00t":  # of another robot alone
        (folder / "experiment_cfg" / "metadata.json").write_text(json.dumps({"gr1": entry(), "oxe_droid": entry()}))
    elif name == "gr00t n1.7":
        (folder / "statistics.json").unlink()
    else:
        for file in folder.glob("policy_*"):
            file.unlink()
        if name == "pi05":  # as lerobot/pi05_base: a normaliser without a file of numbers, features of another robot
            steps = [{"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}}]
            steps.append({"registry_name": "normalizer_processor", "config": {"norm_map": {}, "features": {}}})
            (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
        (folder / "state_in_prompt.json").unlink(missing_ok=True)
        wide = {"observation.state": {"type": "STATE", "shape": [32]}}
        images = {f"observation.images.{camera}": {"type": "VISUAL", "shape": [3, 64, 64]} for camera in ENV.cameras}
        features = {"input_features": {**images, **wide}, "output_features": {"action": {"shape": [32]}}}
        edit(folder / "config.json", **features)
    return {}


@pytest.mark.parametrize("name", BASES)
def test_a_base_without_statistics_is_cloned(name: str, tmp_path: Path) -> None:
    plugin, keys = BASES[name]
    base, out = tmp_path / "base", tmp_path / "out"
    plugin.build(plugin.config(**{"preset": "tiny", **keys}), ModelContext(env=ENV, chunk=CHUNK)).save(base)
    config = plugin.config(checkpoint=str(base), **without_statistics(base, name))
    with pytest.raises(Problems, match="statistics|embodiment|is not a complete checkpoint"):
        plugin.check(config, CheckContext(chunk=CHUNK))
    plugin.check(config, CheckContext(chunk=CHUNK, scaling={}))
    model = plugin.build(config, ModelContext(env=ENV, chunk=CHUNK, scaling=SCALING))
    model.imitation_loss(observation(2), torch.full((2, CHUNK, 3), 0.5).numpy()).backward()
    model.save(out)
    again = plugin.build(plugin.config(checkpoint=str(out)), ModelContext(env=ENV, chunk=CHUNK))
    one, two = (m.sample_chunk(observation(2), noise(2), False).actions for m in (model, again))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("run", "demanded"), [("sft", False), ("eval", False), ("run", True)])
def test_a_spec_whose_data_scale(tmp_path: Path, run: str, demanded: bool) -> None:
    """A run that cloned is evaluated by the data's statistics too; reinforcement learning from the base is not."""
    smolvla.plugin.build(SmolVLAConfig(preset="tiny"), ModelContext(env=ENV, chunk=CHUNK)).save(tmp_path)
    without_statistics(tmp_path, "smolvla")
    spec = parse_spec({
        "name": "clone", "model": {"type": "smolvla", "checkpoint": str(tmp_path)},
        "env": {"type": "tabletop", "num_envs": 4}, "rollout": {"chunk": CHUNK, "episodes": 4, "group_size": 4},
        "imitation": {"data": {"type": "lerobot", "folder": "/none"}, "statistics": "data", "steps": 1, "lr": 1e-3},
        "algorithm": {"type": "grpo"}, "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
    })  # fmt: skip
    try:
        check_spec(spec, training=run == "run", imitation=run == "sft")
        said = ""
    except SpecError as error:  # the data are not there
        said = str(error)
    assert ("policy_preprocessor.json" in said) == demanded
    assert ("imitation" in said) == (run == "sft")
