"""Weights in safetensors files, one or many: checked by their headers, then copied one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch
from attrs import frozen
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vla_rl.plugins.models.openvla.locate import CheckpointError, unfinished, unreadable

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GIB = 1024**3
SHARD_BYTES = 5 * 10**9
"""Largest file of weights that is written."""
Shapes = Mapping[str, tuple[int, ...]]


@frozen(kw_only=True)
class WeightFiles:
    """The tensors of a folder and the files that hold them."""

    folder: Path
    files: Mapping[Path, tuple[str, ...]]
    """File -> names of its tensors."""
    shapes: Shapes

    def each(self, visit: Callable[[str, Tensor], None]) -> None:
        """Call with every tensor on the CPU, one at a time."""
        for path, names in self.files.items():
            try:
                with safe_open(path, "pt") as file:
                    for name in names:
                        visit(name, file.get_tensor(name))
            except CheckpointError:
                raise
            except Exception as error:
                raise unreadable(path, error) from error

    def fingerprint(self) -> str:
        """Of names, shapes and the first row of every tensor: tells one base of adapters from another, and reads
        thousandths of the files."""
        digest = sha256()
        for path, names in sorted(self.files.items()):
            with safe_open(path, "pt") as file:
                for name in sorted(names):
                    row = file.get_slice(name)[:1].contiguous()
                    digest.update(f"{name} {self.shapes[name]} {row.dtype} ".encode())
                    digest.update(row.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def find_weights(folder: Path) -> WeightFiles:
    """Raises CheckpointError for files that are missing, half there or unreadable."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() or not index.is_file():
        paths = [single]
    else:
        try:
            paths = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except Exception as error:
            raise unreadable(index, error) from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing and len(paths) == 1:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {missing[0]}{_other_format(folder)}{unfinished(folder)}"
        )
    if missing:
        raise CheckpointError(
            f"{folder} is half-downloaded: {len(missing)} of {len(paths)} weight files are missing "
            f"({', '.join(missing)}){unfinished(folder)}; fetch them again"
        )
    files: dict[Path, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                files[path] = tuple(file.keys())
                shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in files[path]})
        except Exception as error:
            raise unreadable(path, error) from error
    return WeightFiles(folder=folder, files=files, shapes=shapes)


def _other_format(folder: Path) -> str:
    found = sorted(p.name for pattern in ("pytorch_model*.bin", "*.pth") for p in folder.glob(pattern))
    return f" ({found[0]} is not read; save it anew as safetensors)" if found else ""


def check_names(own: Shapes, given: Shapes, source: Path, remedy: str = "") -> None:
    """Raises CheckpointError that lists what is missing, unexpected or of another shape."""
    wrong = [f"{n}: {given[n]} instead of {own[n]}" for n in own.keys() & given.keys() if own[n] != given[n]]
    missing, unexpected = own.keys() - given.keys(), given.keys() - own.keys()
    problems: dict[str, Any] = {"missing": missing, "unexpected": unexpected, "of another shape": wrong}
    lines = [f"  {what} ({len(names)}): {_some(names)}" for what, names in problems.items() if names]
    if lines:
        raise CheckpointError("\n".join([f"{source} does not fit the model that is asked for{remedy}:", *lines]))


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def load_weights(module: nn.Module, state: Mapping[str, Tensor], source: Path, remedy: str = "") -> None:
    """Copy tensors in, all of them and nothing else. Raises CheckpointError that lists what does not fit."""
    check_names(shapes_of(module.state_dict()), shapes_of(state), source, remedy)
    module.load_state_dict(state)


def unchanged(name: str, tensor: Tensor) -> Tensor:
    return tensor


def write_weights(folder: Path, outline: Mapping[str, Tensor], read: Callable[[str], Tensor], shard_bytes: int) -> None:
    """One file, or shards and their index. No more than a shard is in memory at a time.

    Args:
        outline: names, with tensors on the meta device.   read: name -> the tensor, on the host.
    """
    pattern = WEIGHTS.replace(".", "{suffix}.")
    plan = split_torch_state_dict_into_shards(dict(outline), filename_pattern=pattern, max_shard_size=shard_bytes)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: read(name) for name in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (folder / WEIGHTS).unlink(missing_ok=True)  # of an earlier save; it would be read instead


def fill(
    network: nn.Module,
    weights: WeightFiles,
    device: torch.device,
    dtype: torch.dtype,
    change: Callable[[str, Tensor], Tensor] = unchanged,
) -> None:
    """Give a network on the meta device its weights: there is never a second copy of them, nor a wider one.

    Args:
        change: (name, tensor of the file) -> tensor to use.
    """
    own = network.state_dict()
    check_names(shapes_of(own), weights.shapes, weights.folder)
    check_memory(sum(tensor.numel() for tensor in own.values()), dtype, device, weights.folder)

    def put(name: str, tensor: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        module = network.get_submodule(path)
        trained = module.get_parameter(leaf).requires_grad
        data = change(name, tensor).to(device, dtype, copy=True)
        setattr(module, leaf, nn.Parameter(data, requires_grad=trained))

    weights.each(put)


def allocate(network: nn.Module, device: torch.device, dtype: torch.dtype, source: str) -> None:
    """Give a network on the meta device its memory, all zeros, or say that there is too little."""
    check_memory(sum(p.numel() for p in network.parameters()), dtype, device, source)
    for module in network.modules():
        for name, p in module.named_parameters(recurse=False):
            memory = torch.zeros(p.shape, device=device, dtype=dtype)
            setattr(module, name, nn.Parameter(memory, requires_grad=p.requires_grad))


def check_memory(parameters: int, dtype: torch.dtype, device: torch.device, source: Path | str) -> None:
    """Raises CheckpointError, before anything is read, when the weights alone are more than the device has free."""
    need, free = parameters * dtype.itemsize, free_memory(device)
    if need <= free:
        return
    half = f"set model.dtype: bfloat16 ({need / 2 / GIB:.1f} GiB) or " if dtype == torch.float32 else ""
    raise CheckpointError(
        f"{source} does not fit on {device}: {parameters:,} weights as {str(dtype).removeprefix('torch.')} need "
        f"{need / GIB:.1f} GiB (training needs more), {free / GIB:.1f} GiB are free; {half}use a larger device"
    )


def free_memory(device: torch.device) -> int:
    """Bytes that are free there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
