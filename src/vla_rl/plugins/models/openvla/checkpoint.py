"""A folder in OpenVLA's public layout: config.json, model.safetensors, tokenizer.json, tokenizer_config.json,
dataset_statistics.json, `proprio_projector--*_checkpoint.pt`; beside it value_head.safetensors, which is ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.plugins.models.openvla.heads import OFTModule
from vla_rl.plugins.models.openvla.lora import merged_state
from vla_rl.plugins.models.openvla.prompts import TOKENIZER_CONFIG
from vla_rl.plugins.models.openvla.statistics import STATISTICS, CheckpointError, choose_statistics, resolve

T = TypeVar("T")
WEIGHTS, VALUE_HEAD = "model.safetensors", "value_head.safetensors"
PROPRIO_PATTERN, PROPRIO_FILE = "proprio_projector--*_checkpoint.pt", "proprio_projector--latest_checkpoint.pt"


@frozen(kw_only=True)
class Checkpoint:
    """An opened folder; weights are read by `load_weights`."""

    folder: Path
    config: OpenVLAConfig
    tokenizer: Tokenizer

    @property
    def setup(self) -> dict[str, Any]:
        """How the policy was trained, as far as the folder says so."""
        return dict(self.config.policy_setup)

    @property
    def proprio_file(self) -> Path | None:
        files = sorted(self.folder.glob(PROPRIO_PATTERN))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(f"{self.folder} holds {len(files)} proprio projectors; keep one of: {names}")
        return files[0] if files else None

    def statistics(self, unnorm_key: str | None) -> tuple[str, dict[str, Any]]:
        """Name and entry of a data set's statistics; `X` also finds `X_no_noops`."""
        return choose_statistics(self.folder, self.config.norm_stats, unnorm_key)


def open_checkpoint(name: str) -> Checkpoint:
    """Read what is light: sizes, statistics, tokenizer."""
    folder = resolve(name)
    raw = _json(folder, "config.json")
    if raw.get("model_type") != OpenVLAConfig.model_type:
        raise CheckpointError(
            f"{folder} holds a model of type {raw.get('model_type')!r}, not {OpenVLAConfig.model_type!r}; "
            "choose the model plugin that matches it"
        )
    config = _read(folder / "config.json", lambda _: OpenVLAConfig.from_dict(raw))
    if (folder / STATISTICS).is_file():
        config.norm_stats = _json(folder, STATISTICS)
    tokenizer = _read(folder / "tokenizer.json", lambda path: Tokenizer.from_file(str(path)))
    return Checkpoint(folder=folder, config=config, tokenizer=tokenizer)


def _read(path: Path, reader: Callable[[Path], T]) -> T:
    """Whatever is wrong with a file of a checkpoint becomes an error that names the file."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} is not a complete checkpoint: it has no {path.name}")
    try:
        return reader(path)
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _json(folder: Path, name: str) -> dict[str, Any]:
    content = _read(folder / name, lambda path: json.loads(path.read_text()))
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / name} must hold a JSON object, not a {type(content).__name__}")
    return content


def load_weights(module: nn.Module, state: dict[str, Tensor], source: Path, remedy: str = "") -> None:
    """Copy tensors in, all of them and nothing else. Raises CheckpointError that lists what does not fit."""
    own = module.state_dict()
    wrong = [
        f"{name}: {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own.keys() & state.keys()
        if own[name].shape != state[name].shape
    ]
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": wrong}
    lines = [f"  {what} ({len(names)}): {_some(names)}" for what, names in problems.items() if names]
    if lines:
        raise CheckpointError("\n".join([f"{source} does not fit the model that is asked for{remedy}:", *lines]))
    module.load_state_dict(state)


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def read_network(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return _read(checkpoint.folder / WEIGHTS, load_file)


def read_proprio(path: Path) -> dict[str, Tensor]:
    """The state of OpenVLA-OFT's projector, saved from inside a DistributedDataParallel wrapper or not."""
    state = _read(path, lambda file: torch.load(file, map_location="cpu", weights_only=True))
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def read_value_head(folder: Path) -> dict[str, Tensor] | None:
    """The critic that was saved beside the checkpoint, if there is one."""
    path = folder / VALUE_HEAD
    return _read(path, load_file) if path.is_file() else None


def save_checkpoint(
    module: OFTModule, config: OpenVLAConfig, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype | None = None
) -> None:
    """Write the folder, adapters merged. `dtype` stores floating-point weights in another precision."""
    folder.mkdir(parents=True, exist_ok=True)

    def host(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.detach().to("cpu", dtype or t.dtype).contiguous() for name, t in state.items()}

    save_file(host(merged_state(module.vla)), folder / WEIGHTS, metadata={"format": "pt"})
    if module.proprio_projector is not None:
        torch.save(host(module.proprio_projector.state_dict()), folder / PROPRIO_FILE)
    if module.value_head is not None:
        save_file(host(module.value_head.state_dict()), folder / VALUE_HEAD)
    config.architectures = ["OpenVLAForActionPrediction"]
    config.to_json_file(folder / "config.json", use_diff=False)
    (folder / STATISTICS).write_text(json.dumps(config.norm_stats, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1) + "\n")
