"""A folder in OpenVLA's public layout: config.json, tokenizer.json, tokenizer_config.json, dataset_statistics.json,
model.safetensors (or shards and their index, or a peft adapter and the name of its base), and, from OpenVLA-OFT,
`proprio_projector--*_checkpoint.pt` and `action_head--*_checkpoint.pt`; our files are value_head.safetensors and
deviation.safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from attrs import frozen
from huggingface_hub import split_torch_state_dict_into_shards
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.core.errors import CheckpointError
from vla_rl.core.paths import expand_tilde
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig, check_fit
from vla_rl.plugins.models.openvla.checks import PART, TOKENIZER, find_part, find_tokenizer, read_config
from vla_rl.plugins.models.openvla.config import FamilyConfig
from vla_rl.plugins.models.openvla.heads import PolicyModule, public_network
from vla_rl.plugins.models.openvla.locate import STATISTICS, read_known, resolve_checkpoint
from vla_rl.plugins.models.openvla.lora import (
    Adapter,
    AdapterBase,
    MergedLoRAState,
    compute_fingerprint,
    read_adapter,
    save_adapter,
)
from vla_rl.plugins.models.openvla.prompts import TOKENIZER_CONFIG
from vla_rl.toolkit.json_files import Record, encode_json
from vla_rl.toolkit.models.adapter_files import save_apart
from vla_rl.toolkit.models.checkpoints.files import (
    INDEX,
    WEIGHTS,
    WeightFiles,
    find_weights,
    read_file,
    read_pickled,
    read_tokenizer,
    save_tensors,
)
from vla_rl.toolkit.models.heads import VALUE_HEAD, on_host, save_head

SHARD_BYTES = 5 * 10**9
"""Largest file of weights that is written, in bytes."""
DIFFUSION = "noise_predictor."
"""Prefix of the diffusion head's tensors."""
DEVIATION = "deviation.safetensors"
"""File of the learnt deviation of actions from the L1 head's."""


@frozen(kw_only=True)
class OpenVLACheckpoint:
    """An opened folder; weights are located but not read yet."""

    name: str
    """Name of the checkpoint, as in the spec."""
    folder: Path
    config: OpenVLAConfig
    known: Record
    """Statistics of all data sets, by name."""
    tokenizer: Tokenizer
    weights: WeightFiles
    """Weight files of the network; of its base where the folder holds an adapter."""
    adapter: Adapter | None

    @property
    def proprio_file(self) -> Path | None:
        return find_part(self.folder, "proprio_projector")

    @property
    def action_head_file(self) -> Path | None:
        return find_part(self.folder, "action_head")

    def adapter_base(self, config: FamilyConfig) -> AdapterBase:
        """Return the base to which adapters belong that are trained from this checkpoint with these settings."""
        name = self.adapter.base_fingerprint if self.adapter is not None else self.name
        folder = expand_tilde(name)
        trained = "bf16" if self.adapter is None else self.adapter.frozen_weights
        kind = config.frozen_weights if trained == "bf16" else trained
        place = str(folder.absolute()) if folder.is_dir() else name
        return AdapterBase(place, compute_fingerprint(self.weights), kind)


def open_checkpoint(name: str) -> OpenVLACheckpoint:
    """Open a folder and read what is small: sizes, statistics, tokenizer."""
    folder = resolve_checkpoint(name)
    raw = read_config(folder)
    # auto_map names Python code in the folder, which is not run; nor would a copy of it be there
    settings = {key: value for key, value in raw.data.items() if key != "auto_map"}
    config = read_file(folder / "config.json", lambda _: OpenVLAConfig.from_dict(settings))
    check_fit(raw, config)
    known = read_known(folder, raw)
    config.norm_stats = dict(known.data)
    tokenizer = read_tokenizer(find_tokenizer(folder))
    adapter = None if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file() else read_adapter(folder)
    weights = find_weights(folder if adapter is None else adapter.base_folder())
    return OpenVLACheckpoint(
        name=name, folder=folder, config=config, known=known, tokenizer=tokenizer, weights=weights, adapter=adapter
    )


def read_part(path: Path) -> dict[str, Tensor]:
    """Return the state of a part that is stored separately, saved from a DistributedDataParallel wrapper or not."""
    state = read_pickled(path)
    if not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path} holds other things than tensors; it is to be the state of a part of the network")
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    if any(name.startswith(DIFFUSION) for name in state):
        raise CheckpointError(
            f"{path} is OpenVLA-OFT's diffusion head (use_diffusion), which is not supported; use a checkpoint with "
            "the L1 head"
        )
    return state


def save_checkpoint(
    module: PolicyModule,
    config: OpenVLAConfig,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    base: AdapterBase | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder: adapters merged into the weights, or, with `base`, alone with the name of their base. `dtype`
    stores the weights in another precision; more than `shard_bytes` of them are split over several files."""
    folder.mkdir(parents=True, exist_ok=True)
    if base is None:
        state = MergedLoRAState(module.vla, dtype)
        _write_weights(folder, state.outline_tensors(), state.read_tensor, shard_bytes)
        save_apart(public_network(module.vla), folder)
    else:
        save_adapter(module.vla, folder, base)
    for name, part in (("proprio_projector", module.proprio_projector), ("action_head", module.action_head)):
        if part is not None:
            torch.save(on_host(part.state_dict(), dtype), folder / PART.format(name, "latest"))
    save_head(module.value_head, folder, VALUE_HEAD, dtype)
    save_head(module.deviation, folder, DEVIATION)
    config.architectures = ["OpenVLAForActionPrediction"]
    config.to_json_file(folder / "config.json", use_diff=False)
    (folder / STATISTICS).write_bytes(encode_json(config.norm_stats, indent=1))
    tokenizer.save(str(folder / TOKENIZER), pretty=False)
    (folder / "tokenizer_config.json").write_bytes(encode_json(TOKENIZER_CONFIG, indent=1))


def _write_weights(
    folder: Path, outline: Mapping[str, Tensor], read: Callable[[str], Tensor], shard_bytes: int
) -> None:
    """Write one file, or shards and their index. At most one shard is in memory at a time.

    Args:
        outline: names, with tensors on the meta device.   read: name -> the tensor, on the host.
    """
    pattern = WEIGHTS.replace(".", "{suffix}.")
    plan = split_torch_state_dict_into_shards(dict(outline), filename_pattern=pattern, max_shard_size=shard_bytes)
    for file, names in plan.filename_to_tensors.items():
        save_tensors({name: read(name) for name in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_bytes(encode_json(index))
        (folder / WEIGHTS).unlink(missing_ok=True)  # left by an earlier save; it would be read instead
