"""Low-rank adapters (Hu et al. 2021) through peft, shared by model plugins. Cheap to import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge, gt, lt, optional

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from torch import Tensor, nn

MARK = ".lora_"
"""Infix of the names of adapter parameters, after the name of their layer."""


@frozen(kw_only=True)
class LoRAConfig:
    """Settings of low-rank adapters on every linear layer that would be trained without them (Hu et al. 2021)."""

    rank: int = field(default=32, validator=ge(1))
    """Rank r of the update."""
    alpha: float | None = field(default=None, validator=optional(gt(0.0)))
    """Scale of the update, which is alpha / rank. None: min(rank, 16), as OpenVLA-OFT is fine-tuned."""
    dropout: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """Dropout on the adapters' input, in imitation only: RL scores what the policy really sampled from."""

    @property
    def effective_alpha(self) -> float:
        return min(self.rank, 16) if self.alpha is None else self.alpha


def trained_layers(network: nn.Module) -> list[str]:
    """Return the names of the linear layers whose weights are trained."""
    from torch import nn

    parts = network.named_modules()
    return [name for name, part in parts if isinstance(part, nn.Linear) and part.weight.requires_grad]


def peft_config(config: LoRAConfig, layers: Sequence[str]) -> LoraConfig:
    """Return peft's config of a spec's `lora`, for these layers."""
    from peft import LoraConfig

    alpha: Any = config.effective_alpha
    return LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules=list(layers),
        init_lora_weights="gaussian",
    )


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch's global generators, of the CPU and of that device, inside the block; afterwards they are as
    before."""
    import torch

    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def insert_adapters(network: nn.Module, config: LoRAConfig, seed: int) -> None:
    """Insert adapters, in place, on every linear layer that is trained, and freeze everything else. Their initial
    values depend on the seed alone. They are float32, also if the network is not."""
    from peft import inject_adapter_in_model

    with seeded(seed):
        inject_adapter_in_model(peft_config(config, trained_layers(network)), network)
    for name, parameter in network.named_parameters():
        if MARK in name:  # peft gives them the precision of their layer
            parameter.data = parameter.data.float()


@contextmanager
def before_training(module: nn.Module, **parts: nn.Module | None) -> Iterator[None]:
    """Turn all adapters in the module off inside the block, and put `parts` in place of its own. This gives the policy
    before training without a second copy of the weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    trained_parts = {name: getattr(module, name) for name in parts}
    try:
        for name, part in parts.items():
            setattr(module, name, part)
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for name, part in trained_parts.items():
            setattr(module, name, part)


class MergedState:
    """A network's tensors with adapters merged, under the names that they have without adapters. Each tensor is
    computed when it is read, so saving needs no second copy of the network; the network itself is not changed."""

    def __init__(self, network: nn.Module) -> None:
        state = network.state_dict()
        layers = {name.partition(MARK)[0] for name in state if MARK in name}
        self.tensors: dict[str, Tensor] = {
            name.replace(".base_layer.", "."): t for name, t in state.items() if MARK not in name
        }
        """Tensors by name, without the adapters' updates."""
        self._adapted: dict[str, Any] = {f"{name}.weight": network.get_submodule(name) for name in layers}

    def read(self, name: str) -> Tensor:
        tensor = self.tensors[name].detach()
        if name not in self._adapted:
            return tensor
        delta: Tensor = self._adapted[name].get_delta_weight("default").detach()
        return tensor + delta.to(tensor.dtype)
