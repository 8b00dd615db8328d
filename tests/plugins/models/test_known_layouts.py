"""Folders in the public layouts of known checkpoints: a spec that names one takes its keys, and the model acts.

Their weights are made up: tiny ones on a CPU, and those of the public size, whose names and shapes alone are there, on the
meta device."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from pi0_cases import REFERENCE_SIZES

from reference_files import reference
from vla_rl.core.catalogue import load
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import Spec, checkpoint_record, parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.gpu_memory.model_memory import meta_observation
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.checkpoints.files import WeightFiles
from vla_rl.toolkit.models.meta_device import CudaSemantics
from vla_rl.toolkit.models.prompts import train_tokenizer

LIBERO = attrs.evolve(
    synthetic.env_info(state_dim=8, action_dim=7, bounds=((-1.0, 1.0),)),
    cameras={"wrist": (256, 256), "agentview": (256, 256)},
)
"""What `libero` says of itself with 256-pixel cameras, in another order than the models want."""
AXES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


def spec_of(kind: str, folder: Path, chunk: int | None = None) -> Spec:
    return parse_spec(
        {
            "name": "toy",
            "model": {"type": kind, "checkpoint": str(folder)},
            "env": {"type": "libero", "suite": "libero_spatial", "num_envs": 1},
            "rollout": {"episodes": 2, "group_size": 2, "chunk": chunk},
            "algorithm": {"type": "grpo"},
            "train": {"steps": 0, "lr": 1e-5, "micro_batch": 2},
        }
    )


def build(spec: Spec, device: str = "cpu") -> Any:
    context = ModelContext(env=LIBERO, chunk=spec.rollout.chunk, device=device)
    return load("model", spec.model.type).build(spec.model.config, context)


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def preset(kind: str, target: Path, chunk: int, **config: Any) -> Path:
    """Save random weights in the model's own layout."""
    plugin = load("model", kind)
    plugin.build(plugin.config(**config), ModelContext(env=LIBERO, chunk=chunk)).save(target)
    return target


def public_openvla(folder: Path, unnorm_key: str) -> Path:
    """Leave out what only ours record, and name the statistics as OpenVLA's training does."""
    edit(folder / "config.json", policy_setup=None)
    (entry,) = json.loads((folder / "dataset_statistics.json").read_text()).values()
    other = {"action": {"q01": [0.0], "q99": [1.0], "mask": [True]}}
    (folder / "dataset_statistics.json").write_text(json.dumps({"another": other, unnorm_key: entry}))
    return folder


def openvla(root: Path) -> tuple[str, Path]:
    folder = preset(
        "openvla", root / "openvla/openvla-7b-finetuned-libero-goal", 1, preset="fast", cameras=("agentview",)
    )
    return "openvla", public_openvla(folder, "libero_goal_no_noops")


def oft_l1(root: Path) -> tuple[str, Path]:
    name = "moojink/openvla-7b-oft-finetuned-libero-10"
    folder = preset("openvla_oft", root / name, 8, preset="fast", head="l1", use_proprio=True)
    assert [file.name.partition("--")[0] for file in sorted(folder.glob("*--*"))] == [
        "action_head",
        "proprio_projector",
    ]
    return "openvla_oft", public_openvla(folder, "libero_10_no_noops")


def oft_tokens(root: Path) -> tuple[str, Path]:
    name = "RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora"
    folder = preset("openvla_oft", root / name, 8, preset="fast", use_proprio=False, cameras=("agentview",))
    return "openvla_oft", public_openvla(folder, "libero_130_no_noops_trajall")


def lerobot_pi0(root: Path) -> tuple[str, Path]:
    return "pi0", preset("pi0", root / "lerobot/pi0_libero_finetuned", 10, preset="tiny")


def lerobot_pi05(root: Path) -> tuple[str, Path]:
    folder = preset("pi05", root / "lerobot/pi05_libero_finetuned", 10, preset="tiny")
    (folder / "state_in_prompt.json").unlink()
    return "pi05", folder


def smolvla(root: Path) -> tuple[str, Path]:
    return "smolvla", preset("smolvla", root / "lerobot/smolvla_libero", 50, preset="tiny")


def groot_n1_5(root: Path) -> tuple[str, Path]:
    folder = preset("gr00t", root / "RLinf/RLinf-Gr00t-SFT-Spatial", 16, preset="tiny")
    shape = dict.fromkeys(AXES, 1)
    sizes = {"action": shape, "state": shape | {"gripper": 2}}
    statistics = {
        part: {key: {"min": [0.0 if key == "gripper" else -1.0] * n, "max": [1.0] * n} for key, n in keys.items()}
        for part, keys in sizes.items()
    }
    video = {name: {"resolution": [64, 64], "channels": 3, "fps": 20.0} for name in ("image", "wrist_image")}
    entry = {"statistics": statistics, "modalities": {"video": video}, "embodiment_tag": "libero_franka"}
    other = {"statistics": {}, "modalities": {}}
    (folder / "experiment_cfg/metadata.json").write_text(json.dumps({"new_embodiment": other, "libero_franka": entry}))
    return "gr00t", folder


def groot_n1_7(root: Path) -> tuple[str, Path]:
    folder = preset("gr00t", root / "nvidia/GR00T-N1.7-LIBERO/libero_goal", 16, preset="tiny_n1_7")
    for name in ("processor_config.json", "statistics.json", "embodiment_id.json"):
        text = (folder / name).read_text()
        assert "new_embodiment" in text
        (folder / name).write_text(text.replace("new_embodiment", "libero_sim"))
    return "gr00t", folder


LAYOUTS = (openvla, oft_l1, oft_tokens, lerobot_pi0, lerobot_pi05, smolvla, groot_n1_5, groot_n1_7)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_folder_of_a_known_checkpoint_acts_with_its_keys(layout, tmp_path, caplog):
    kind, folder = layout(tmp_path)
    spec = spec_of(kind, folder, None if kind.startswith("openvla") else 5)
    record = checkpoint_record(spec)
    assert record is not None and record["name"] == str(folder.relative_to(tmp_path))
    assert all("known" not in entry for entry in record["keys"].values())
    model = build(spec)
    assert model.cameras_read == tuple(record["keys"]["model.cameras"]["value"])
    obs = synthetic.observation(LIBERO, 2)
    chunk = model.sample_chunk(obs, Noise(0, "known", [0, 1], [0, 0], [0, 0]), True)
    assert chunk.actions.shape == (2, spec.rollout.chunk, 7) and bool(torch.as_tensor(chunk.actions).isfinite().all())
    if "model.gripper" in record["keys"]:
        assert set(torch.as_tensor(chunk.actions)[..., -1].unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_a_checkpoint_does_not_act_without_its_keys(tmp_path):
    """The same folder under another name: nothing says which of its statistics to scale by."""
    _, folder = oft_tokens(tmp_path)
    with pytest.raises(CheckpointError, match="several statistics; set unnorm_key"):
        build(spec_of("openvla_oft", folder.rename(tmp_path / "other"), 8))


# ------------------------------------------------------------------------------------------- public sizes


def hollow_weights(file: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file with these tensors and no bytes of theirs: the file is as long, and sparse."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def tokenizer(folder: Path, prompt: Any, size: int) -> None:
    train_tokenizer((task.instruction for task in LIBERO.tasks), prompt, size).save(str(folder / "tokenizer.json"))


def full_openvla(root: Path) -> tuple[str, Path]:
    kind, folder = oft_tokens(root)  # tokenizer and statistics of the tiny one
    raw = json.loads(reference("openvla", "config.json").read_text())
    raw["image_sizes"] = [224, 224]
    raw["text_config"] = {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "vision_specs"}))
    hollow_weights(
        folder / "model.safetensors", json.loads(reference("openvla", "keys_openvla7b_full.json").read_text())
    )
    return kind, folder


def openpi(folder: Path, reference_folder: str, horizon: int, quantiles: bool) -> Path:
    from vla_rl.plugins.models.pi0.builder import prompt_text

    folder.mkdir(parents=True)
    keys = json.loads(reference(reference_folder, f"keys_{reference_folder}_full.json").read_text())
    hollow_weights(folder / "model.safetensors", keys)
    (folder / "config.json").write_text(json.dumps({"action_dim": 32, "action_horizon": horizon}))
    low, high = ("q01", "q99") if quantiles else ("mean", "std")
    entry = {name: {low: [-0.5] * size, high: [0.5] * size} for name, size in (("actions", 7), ("state", 8))}
    assets = folder / "assets/physical-intelligence/libero"
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": entry}))
    tokenizer(folder, prompt_text, REFERENCE_SIZES.vocab)
    return folder


def full_pi0(root: Path) -> tuple[str, Path]:
    return "pi0", openpi(root / "RLinf/RLinf-Pi0-LIBERO-Spatial-Object-Goal-SFT", "pi0", 50, quantiles=False)


def full_pi05(root: Path) -> tuple[str, Path]:
    return "pi05", openpi(root / "openpi-assets/checkpoints/pi05_libero", "pi05", 10, quantiles=True)


def full_smolvla(root: Path) -> tuple[str, Path]:
    kind, folder = smolvla(root)
    (folder / "architecture.json").unlink()
    edit(folder / "config.json", max_action_dim=32, max_state_dim=32, chunk_size=50)
    keys = json.loads(reference("smolvla", "keys_smolvla_full.json").read_text())
    hollow_weights(folder / "model.safetensors", {f"model.{name}": shape for name, shape in keys.items()})
    return kind, folder


def full_groot_n1_5(root: Path) -> tuple[str, Path]:
    kind, folder = groot_n1_5(root)
    (folder / "architecture.json").unlink()
    head = json.loads((folder / "config.json").read_text())["action_head_cfg"]
    head |= {"action_horizon": 16, "action_dim": 32, "max_state_dim": 64}
    edit(folder / "config.json", action_head_cfg=head)
    hollow_weights(
        folder / "model.safetensors", json.loads(reference("gr00t", "keys_gr00t_n1_5_full.json").read_text())
    )
    return kind, folder


def full_groot_n1_7(root: Path) -> tuple[str, Path]:
    kind, folder = groot_n1_7(root)
    (folder / "architecture.json").unlink()
    edit(folder / "config.json", action_horizon=40, max_action_dim=132, max_state_dim=132)
    processor = json.loads((folder / "processor_config.json").read_text())
    processor["processor_kwargs"]["shortest_image_edge"] = 256
    (folder / "processor_config.json").write_text(json.dumps(processor))
    keys = json.loads(reference("gr00t", "n1_7", "keys_gr00t_n1_7_full.json").read_text())
    hollow_weights(folder / "model.safetensors", keys)
    return kind, folder


@pytest.mark.parametrize(
    ("layout", "billions"),
    [
        (full_openvla, 7.5),
        (full_pi0, 3.5),
        (full_pi05, 3.6),
        (full_smolvla, 0.45),
        (full_groot_n1_5, 2.41),
        (full_groot_n1_7, 3.14),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_of_the_public_size_is_opened_and_acts_on_the_meta_device(layout, billions, tmp_path, monkeypatch):
    kind, folder = layout(tmp_path)
    spec = spec_of(kind, folder, None if kind.startswith("openvla") else 5)
    assert checkpoint_record(spec) is not None
    check_spec(spec, training=False)  # headers, statistics, chunk, tokenizer

    def each(self: WeightFiles, visit: Any) -> None:
        for name, shape in self.shapes.items():
            visit(name, torch.empty(shape, dtype=torch.bfloat16, device="meta"))

    monkeypatch.setattr(WeightFiles, "visit_tensors", each)
    with CudaSemantics():
        model = build(spec, "meta")
        chunk = model.sample_chunk(meta_observation(LIBERO, 2), Noise(0, "sizes", [0, 1], [0, 0], [0, 0]), False)
    assert chunk.actions.shape == (2, spec.rollout.chunk, 7)
    assert sum(p.numel() for p in model.module.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)
