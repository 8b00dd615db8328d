"""A folder in lerobot's layout (read and written) or openpi's (read).

Beside lerobot's files there may be ours: value_head.safetensors, noise_head.safetensors, and architecture.json, the
sizes of a network that is not one of the public ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen
from safetensors.torch import save, save_file
from tokenizers import Tokenizer
from torch import Tensor, tensor

from vla_rl.plugins.models.pi0.architecture import Shape, Sizes
from vla_rl.plugins.models.pi0.layout import LEROBOT, open_names, public_name
from vla_rl.plugins.models.pi0.network import Pi0Module
from vla_rl.plugins.models.pi0.statistics import TOKENIZER, WANTED, find_tokenizer, read_config, read_statistics
from vla_rl.toolkit.models.adapters import MergedState
from vla_rl.toolkit.models.checkpoints import WEIGHTS, WeightFiles, find_weights, read_file, read_json, resolve
from vla_rl.toolkit.models.heads import NOISE_HEAD, VALUE_HEAD, save_head
from vla_rl.toolkit.models.lerobot import ACTION, IMAGES, MODES, NORMALIZER, PREPROCESSOR, STATE, Scale, Statistics

ARCHITECTURE = "architecture.json"
SLOTS = 3
"""Images that pi0 was trained with: base, left wrist, right wrist."""


@frozen(kw_only=True)
class Checkpoint:
    """An opened folder, or what a preset has instead; weights are found, and not yet read."""

    sizes: Sizes
    shape: Shape
    statistics: Statistics
    tokenizer: Tokenizer
    raw: Mapping[str, Any]
    """config.json in lerobot's layout."""
    folder: Path | None = None
    weights: WeightFiles | None = None
    """By openpi's names."""
    processors: Mapping[str, bytes] = attrs.field(factory=dict)
    """lerobot's files of pre- and post-processing, kept as they are."""

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the images it was trained with, in order; none where the folder does not say."""
        names = [name.removeprefix(IMAGES) for name in self.raw.get("input_features", {}) if name.startswith(IMAGES)]
        return tuple(name for name in names if not name.startswith("empty_camera"))

    @property
    def slots(self) -> int:
        """Images it can take."""
        return max(SLOTS, len(self.images))


def open_checkpoint(name: str, tokenizer: str | None, asset_id: str | None) -> Checkpoint:
    """Read what is light: sizes, statistics, tokenizer."""
    folder = resolve(name, WANTED)
    raw = read_config(folder)
    own = folder / ARCHITECTURE
    sizes = read_file(own, lambda path: Sizes(**read_json(path))) if own.is_file() else Sizes.of_variants(raw)
    shape = read_file(folder / "config.json", lambda _: Shape.read(raw))
    statistics = read_statistics(folder, raw, asset_id)
    file = find_tokenizer(folder, tokenizer)
    return Checkpoint(
        sizes=sizes,
        shape=shape,
        statistics=statistics,
        tokenizer=read_file(file, lambda path: Tokenizer.from_file(str(path))),
        raw=raw if raw.get("type") == "pi0" else {},
        folder=folder,
        weights=find_weights(folder, open_names),
        processors={path.name: path.read_bytes() for path in sorted(folder.glob("policy_p*processor*"))},
    )


def save_checkpoint(module: Pi0Module, checkpoint: Checkpoint, cameras: tuple[str, ...], folder: Path) -> None:
    """Write the folder in lerobot's layout, adapters merged into the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = MergedState(module.pi0)
    state = {LEROBOT + public_name(name): merged.read(name).cpu().contiguous() for name in merged.tensors}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    for head, name in ((module.value_head, VALUE_HEAD), (module.noise_head, NOISE_HEAD)):
        save_head(head, folder, name)
    raw = checkpoint.raw or lerobot_config(checkpoint, cameras)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for name, content in (checkpoint.processors or lerobot_processors(raw, checkpoint.statistics)).items():
        (folder / name).write_bytes(content)
    if raw.get("paligemma_variant") is None:
        (folder / ARCHITECTURE).write_text(json.dumps(attrs.asdict(checkpoint.sizes), indent=2) + "\n")
    checkpoint.tokenizer.save(str(folder / TOKENIZER), pretty=False)


def lerobot_config(checkpoint: Checkpoint, cameras: tuple[str, ...]) -> dict[str, Any]:
    """config.json for a network that came from openpi's layout or from a preset."""
    sizes, shape, scales = checkpoint.sizes, checkpoint.shape, checkpoint.statistics
    pixels = [3, sizes.image_size, sizes.image_size]
    inputs: dict[str, Any] = {f"{IMAGES}{name}": {"type": "VISUAL", "shape": pixels} for name in cameras}
    modes = {"VISUAL": "IDENTITY", "ACTION": scales.action.mode}
    if scales.state is not None:
        inputs[STATE] = {"type": "STATE", "shape": [scales.state.dim]}
        modes["STATE"] = scales.state.mode
    return {
        "type": "pi0",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": {ACTION: {"type": "ACTION", "shape": [scales.action.dim]}},
        "normalization_mapping": modes,
        **variants(sizes),
        "chunk_size": shape.horizon,
        "n_action_steps": shape.horizon,
        "max_state_dim": shape.state_dim,
        "max_action_dim": shape.action_dim,
        "min_period": shape.min_period,
        "max_period": shape.max_period,
        "image_resolution": pixels[1:],
        "tokenizer_max_length": shape.tokenizer_max_length,
    }


def variants(sizes: Sizes) -> dict[str, str]:
    """The public names of these sizes; empty where they have none."""
    for text in ("gemma_2b", "gemma_300m"):
        names = {"paligemma_variant": text, "action_expert_variant": "gemma_300m"}
        if Sizes.of_variants(names) == sizes:
            return names
    return {}


def lerobot_processors(raw: Mapping[str, Any], statistics: Statistics) -> dict[str, bytes]:
    """lerobot's pre- and post-processing files with these statistics."""
    settings = {
        "eps": statistics.action.eps,
        "features": {**raw["input_features"], **raw["output_features"]},
        "norm_map": raw["normalization_mapping"],
    }
    tokenizer = {
        "max_length": raw["tokenizer_max_length"],
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": "google/paligemma-3b-pt-224",
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    before, after = (f"policy_preprocessor_step_5_{NORMALIZER}", f"policy_postprocessor_step_0_un{NORMALIZER}")
    pre = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "pi0_new_line_processor", "config": {}},
        {"registry_name": "tokenizer_processor", "config": tokenizer},
        device,
        {"registry_name": NORMALIZER, "config": settings, "state_file": f"{before}.safetensors"},
    ]
    outwards = {**settings, "features": raw["output_features"]}
    post = [{"registry_name": f"un{NORMALIZER}", "config": outwards, "state_file": f"{after}.safetensors"}, device]
    tensors = save({**_tensors(ACTION, statistics.action), **_tensors(STATE, statistics.state)})
    return {
        PREPROCESSOR: _json({"name": "policy_preprocessor", "steps": pre}),
        "policy_postprocessor.json": _json({"name": "policy_postprocessor", "steps": post}),
        f"{before}.safetensors": tensors,
        f"{after}.safetensors": tensors,
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _tensors(feature: str, scale: Scale | None) -> dict[str, Tensor]:
    if scale is None:
        return {}
    return {f"{feature}.{name}": tensor(value) for name, value in zip(MODES[scale.mode], scale.values, strict=True)}
