"""Writes weights as safetensors, in one file or in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from vla_rl.toolkit.json_files import encode_json
from vla_rl.toolkit.models.checkpoints.files import INDEX, WEIGHTS, save_tensors

SHARD_BYTES = 5 * 10**9
"""Largest file of weights that is written, in bytes."""


def write_weights(folder: Path, outline: Mapping[str, Tensor], read: Callable[[str], Tensor], shard_bytes: int) -> None:
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
