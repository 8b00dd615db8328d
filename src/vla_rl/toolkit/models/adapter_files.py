"""Adapters on weights in fewer bits (`model.frozen_weights`), saved apart in addition to the merged weights: their sum,
stored in fewer bits again, would be another policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from vla_rl.toolkit.models.adapters import TRAINED, LoRAConfig, check_adapter, keep_start
from vla_rl.toolkit.models.checkpoints.files import read_file, save_tensors
from vla_rl.toolkit.models.frozen_weights import FrozenLinear, store_frozen_weights, unpack_weight

APART = "adapters.safetensors"
"""File with adapters and the weights below them, by the names of the network's own layers."""


def save_apart(network: nn.Module, folder: Path) -> None:
    """Write adapters and the weights below them as they are, if any of these are stored in fewer bits."""
    layers: dict[str, Any] = {name: part for name, part in network.named_modules() if hasattr(part, "lora_A")}
    bases = {name: layer.get_base_layer() for name, layer in layers.items()}
    kinds = {base.kind for base in bases.values() if isinstance(base, FrozenLinear)}
    (folder / APART).unlink(missing_ok=True)
    if not kinds:
        return
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        tensors |= {f"{name}.lora_A": layer.lora_A[TRAINED].weight, f"{name}.lora_B": layer.lora_B[TRAINED].weight}
        tensors |= {f"{name}.{part}": p for part, p in bases[name].named_parameters() if part != "bias"}
    layer = next(iter(layers.values()))
    save_tensors(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / APART,
        {"format": "pt", "frozen_weights": kinds.pop(), "alpha": str(layer.scaling[TRAINED] * layer.r[TRAINED])},
    )


def store_network(
    module: nn.Module, network: nn.Module, blocks: Sequence[type[nn.Module]], config: Any, folder: Path | None
) -> None:
    """Store a module's frozen weights as the spec says (`store_frozen_weights`), with adapters that its folder holds
    apart. Raise CheckpointError where the spec asks for other adapters.

    Args:
        network: the part of the module that the folder's weights belong to, which is in full precision.
        config: the model's settings.
        folder: folder of the checkpoint; None: it has none.
    """
    if config.frozen_weights != "bf16" and folder is not None and (folder / APART).is_file():
        read_file(folder / APART, lambda file: _restore_layers(network, file, config.lora))
    store_frozen_weights(module, blocks, config.frozen_weights)


@torch.no_grad()
def _restore_layers(network: nn.Module, file: Path, lora: LoRAConfig | None) -> None:
    """Copy adapters, and weights below them in full precision, into the network. Layers without one stay merged."""
    with safe_open(file, "pt") as saved:
        keys, metadata = set(saved.keys()), saved.metadata()
        for name in sorted(key.removesuffix(".lora_A") for key in keys if key.endswith(".lora_A")):
            layer: Any = network.get_submodule(name)
            adapted, is_stored = hasattr(layer, "lora_A"), f"{name}.stored" in keys
            if not adapted and (layer.weight.requires_grad or not is_stored):
                continue
            rank, alpha = saved.get_slice(f"{name}.lora_A").get_shape()[0], float(metadata["alpha"])
            otherwise = "leave model.frozen_weights out to read the merged weights"
            check_adapter(file, rank, alpha, lora if adapted else None, otherwise)
            weight = layer.get_base_layer().weight
            if not weight.is_meta:
                layer.lora_A[TRAINED].weight.copy_(saved.get_tensor(f"{name}.lora_A"))
                layer.lora_B[TRAINED].weight.copy_(saved.get_tensor(f"{name}.lora_B"))
                if is_stored:
                    stored, scales = (saved.get_tensor(f"{name}.{part}") for part in ("stored", "scales"))
                    base = unpack_weight(stored, scales, metadata["frozen_weights"], weight.shape, weight.dtype)
                else:
                    base = saved.get_tensor(f"{name}.weight")
                weight.copy_(base)
            keep_start(layer)
