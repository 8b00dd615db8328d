"""Parts that networks of several model plugins share, and how networks get memory and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from vla_rl.core.errors import CheckpointError
from vla_rl.toolkit.models.checkpoints.files import WeightFiles, check_names
from vla_rl.toolkit.models.meta_device import META

GIB = 1024**3
DRAWN_ON_DEVICE = 1_000_000_000
"""Weights from which on random ones are drawn on the network's device: a processor core takes a minute for billions."""
Built = TypeVar("Built", bound=nn.Module)
Normal = Callable[[Tensor, float], None]
"""Function that fills a tensor with normal numbers of this standard deviation."""


def pack_bfloat16(tensor: Tensor) -> Tensor:
    """Return bfloat16 tensors, which NumPy lacks, as int16 with the same bits; others unchanged."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def unpack_bfloat16(tensor: Tensor) -> Tensor:
    """Return what `pack_bfloat16` was given."""
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def as_tensor(array: Any, device: torch.device) -> Tensor:
    """Return an array as a tensor on the device. Read-only NumPy memory (Ray's object store) is copied. To a GPU it
    goes through pinned memory, and the host does not wait for the copy."""
    if device.type == "cuda" and isinstance(array, np.ndarray):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(device, non_blocking=True)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    return torch.as_tensor(array, device=device)


@torch.no_grad()
def initialise_network(
    network: nn.Module, seed: int, last: str, other: Callable[[str, nn.Module, Normal], None]
) -> None:
    """Set random weights that depend on the seed alone, without PyTorch's global generator. For small networks: Xavier
    for linear layers, and a last layer whose output starts near 0. Large networks (`DRAWN_ON_DEVICE`) draw on their
    device, so that their weights depend on its type too.

    Args:
        last: suffix of that layer's name.
        other: sets the weights of modules that are neither linear nor a convolution; biases are always 0.
    """
    own = next(network.parameters()).device
    large = sum(p.numel() for p in network.parameters()) >= DRAWN_ON_DEVICE
    device = own if large and own.type != META else torch.device("cpu")
    rng = torch.Generator(device).manual_seed(seed)

    def fill_normal(tensor: Tensor, std: float) -> None:
        if not tensor.is_meta:
            tensor.copy_(torch.randn(tensor.shape, generator=rng, device=device) * std)

    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            fill_normal(module.weight, 0.02 if name.endswith(last) else math.sqrt(2 / sum(module.weight.shape)))
        elif isinstance(module, nn.Conv2d | nn.Conv3d):
            fill_normal(module.weight, module.weight[0].numel() ** -0.5)
        else:
            other(name, module, fill_normal)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            bias.zero_()


def vision_sizes(sizes: Any) -> dict[str, Any]:
    """Return transformers' keys of a SigLIP tower."""
    return {
        "hidden_size": sizes.vision_width,
        "intermediate_size": sizes.vision_mlp,
        "num_hidden_layers": sizes.vision_depth,
        "num_attention_heads": sizes.vision_heads,
        "image_size": sizes.image_size,
        "patch_size": sizes.patch_size,
    }


def text_sizes(sizes: Any, depth: int) -> dict[str, Any]:
    """Return transformers' keys of a language model of so many layers."""
    return {
        "hidden_size": sizes.text_width,
        "intermediate_size": sizes.text_mlp,
        "num_hidden_layers": depth,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
    }


def sine_cosine_positions(patches: int, dim: int) -> Tensor:
    """Return position embeddings [patches, dim] of a square grid: a quarter of the channels a sin or cos of x or y."""
    side, quarter = math.isqrt(patches), dim // 4
    frequency = math.pi / 2 ** torch.arange(quarter, dtype=torch.float32).mul(5 / max(quarter - 1, 1))
    angle = torch.arange(side, dtype=torch.float32)[:, None] * frequency
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)
    grid = torch.cat([axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)], dim=2)
    return nn.functional.pad(grid.reshape(patches, -1), (0, dim - 4 * quarter))


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def load_weights(module: nn.Module, state: Mapping[str, Tensor], source: Path, remedy: str = "") -> None:
    """Copy tensors into the module, all of them and nothing else. Raise CheckpointError listing misfits."""
    check_names(shapes_of(module.state_dict()), shapes_of(state), source, remedy)
    module.load_state_dict(state)


def keep_tensor(name: str, tensor: Tensor) -> Tensor:
    return tensor


def same_name(name: str) -> str:
    return name


def always_false(name: str) -> bool:
    return False


def fill_network(
    network: nn.Module,
    weights: WeightFiles,
    device: torch.device,
    dtype: torch.dtype,
    *,
    change: Callable[[str, Tensor], Tensor] = keep_tensor,
    public_name: Callable[[str], str] = same_name,
    stays_float32: Callable[[str], bool] = always_false,
) -> None:
    """Load weights into a network that is on the meta device or has untouched memory. There is never a second copy of
    the weights, nor one of higher precision. Raise CheckpointError, before a tensor is read, if they do not fit. For
    the meta device nothing is read.

    Args:
        change: (name, tensor of the file) -> tensor to use.
        public_name: name of a parameter -> name in the files.
        stays_float32: name of a parameter -> whether it stays float32 instead of `dtype`.
    """
    names = {public_name(name): name for name in network.state_dict()}
    check_shapes(network, weights, public_name)
    if device.type == META:
        allocate_network(network, device, dtype, weights.folder, stays_float32)
        return
    _refuse_tied(network)
    check_memory(sum(p.numel() for p in network.parameters()), dtype, device, weights.folder)

    def put_tensor(public: str, tensor: Tensor) -> None:
        name = names[public]
        precision = torch.float32 if stays_float32(name) else dtype
        replace_parameter(network, name, change(public, tensor).to(device, precision, copy=True))

    weights.visit_tensors(put_tensor)


def check_shapes(network: nn.Module, weights: WeightFiles, public_name: Callable[[str], str]) -> None:
    """Raises CheckpointError where the files hold other tensors than the network."""
    shapes = {public_name(name): tuple(network.get_parameter(name).shape) for name in network.state_dict()}
    check_names(shapes, weights.shapes, weights.folder)


def construct_module(make: Callable[[], Built], device: torch.device) -> Built:
    """Return the module that `make` builds, on the device. PyTorch's generator, which constructors use, is put back."""
    with torch.random.fork_rng(devices=[]):
        return make().to(device)


def allocate_network(
    network: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    source: Path | str,
    stays_float32: Callable[[str], bool] = always_false,
) -> None:
    """Allocate a network's memory as in `fill_network`, all zeros. Raise CheckpointError if the memory is too small."""
    _refuse_tied(network)
    check_memory(sum(p.numel() for p in network.parameters()), dtype, device, source)
    for name, p in list(network.named_parameters()):
        precision = torch.float32 if stays_float32(name) else dtype
        replace_parameter(network, name, torch.zeros(p.shape, device=device, dtype=precision))


def _refuse_tied(network: nn.Module) -> None:
    """Raise ValueError for a parameter with two names: each name would get a parameter of its own, as with torch's
    `load_state_dict(assign=True)`."""
    names: dict[nn.Parameter, str] = {}
    for name, p in network.named_parameters(remove_duplicate=False):
        if names.setdefault(p, name) != name:
            raise ValueError(f"{names[p]} and {name} are one parameter; use one of them twice, or tie them afterwards")


def replace_parameter(network: nn.Module, name: str, data: Tensor) -> None:
    """Replace a parameter's tensor; it stays trained or frozen as before."""
    path, _, leaf = name.rpartition(".")
    module = network.get_submodule(path)
    setattr(module, leaf, nn.Parameter(data, requires_grad=module.get_parameter(leaf).requires_grad))


def check_memory(parameters: int, dtype: torch.dtype, device: torch.device, source: Path | str) -> None:
    """Raise CheckpointError, before anything is read, if the weights alone exceed the device's free memory."""
    if device.type == META:
        return
    need, free = parameters * dtype.itemsize, free_memory(device)
    if need <= free:
        return
    half = f"set model.dtype: bfloat16 ({need / 2 / GIB:.1f} GiB) or " if dtype == torch.float32 else ""
    raise CheckpointError(
        f"{source} does not fit on {device}: {parameters:,} weights as {str(dtype).removeprefix('torch.')} need "
        f"{need / GIB:.1f} GiB (training needs more), {free / GIB:.1f} GiB are free; {half}use a larger device"
    )


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
