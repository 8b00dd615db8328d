"""Low-rank adapters (Hu et al. 2021) through peft, shared by model plugins. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge, gt, in_, lt, optional

from vla_rl.core.errors import UserError

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from torch import Tensor, nn

MERGES = ("off", "in_place", "copy")
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
    merge_for_acting: str = field(default="off", validator=in_(MERGES))
    """Act with adapters merged into the weights of their layers: fewer products in each decision. in_place: the weights
    are overwritten while the policy acts, and their bits restored from a copy in host memory; copy: merged weights are
    a second set on the device. The log-probs that learning recomputes then differ by rounding
    (`policy/recompute_kl`)."""

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
def seed_torch(seed: int, device: torch.device | None = None) -> Iterator[None]:
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

    with seed_torch(seed):
        inject_adapter_in_model(peft_config(config, trained_layers(network)), network)
    for name, parameter in network.named_parameters():
        if MARK in name:  # peft gives them the precision of their layer
            parameter.data = parameter.data.float()


@contextmanager
def before_training(module: nn.Module, **parts: nn.Module | None) -> Iterator[None]:
    """Turn all adapters in the module off inside the block, and put `parts` in place of the module's. This gives the
    policy before training without a second copy of the weights. Afterwards adapters are on or off, and trained or
    frozen, as they were."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    if any(layer.merged for layer in layers):  # peft would subtract the update, which does not restore the bits
        raise RuntimeError("the policy before training cannot be scored while adapters are merged")
    enabled = [layer for layer in layers if not layer.disable_adapters]
    trained = {p for layer in enabled for p in layer.parameters() if p.requires_grad}
    trained_parts = {name: getattr(module, name) for name in parts}
    try:
        for name, part in parts.items():
            setattr(module, name, part)
        for layer in enabled:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)  # peft makes all adapters trainable
            for parameter in layer.parameters():
                parameter.requires_grad_(parameter in trained)
        for name, part in trained_parts.items():
            setattr(module, name, part)


def has_adapters(network: nn.Module) -> bool:
    """Return whether a layer of the network has an adapter. Does not import peft where none has."""
    return any(MARK in name for name, _ in network.named_parameters())


def adapted_layers(network: nn.Module) -> list[Any]:
    """Return the linear layers that have an adapter. Does not import peft where none has."""
    if not has_adapters(network):
        return []
    from peft.tuners.lora import Linear

    return [layer for layer in network.modules() if isinstance(layer, Linear)]


def merge_mode(config: Any) -> str:
    """Return `lora.merge_for_acting` of a model's settings; "off" for a model without adapters."""
    lora = getattr(config, "lora", None)
    return lora.merge_for_acting if isinstance(lora, LoRAConfig) else "off"


def merge_state(network: nn.Module) -> Callable[[], bool]:
    """Return a function that says whether the network's adapters are merged now."""
    layers = [layer for layer in network.modules() if hasattr(layer, "merged_adapters")]
    return lambda: bool(layers and layers[0].merged_adapters)


class MergedAdapters:
    """Adapters of a network, merged into the weights of their layers while the policy acts (W + scale B A, computed in
    float32 and rounded once to the weights' type).

    The layers' own weights are frozen, so a copy made once restores their bits exactly. In mode "in_place" it is in
    host memory: as many bytes as the adapted layers have (13 GiB of a 7B model in bfloat16), which `restore_weights`
    copies back to the device (0.3 s from pinned memory at 55 GB/s). In mode "copy" merged weights are a second set on
    the device, and only pointers change.
    """

    def __init__(self, network: nn.Module, mode: str) -> None:
        """Find the adapted layers, and copy their weights. Raise UserError without adapted layers."""
        self._layers = adapted_layers(network)
        if not self._layers:
            raise UserError("lora.merge_for_acting: no layer of the network has an adapter; leave it out")
        self._in_place = mode == "in_place"
        copied = _host_copy if self._in_place else _empty_like
        self._second = [copied(_base_weight(layer).data) for layer in self._layers]
        """For each layer, its own weight in host memory (in_place), or memory for the merged one (copy)."""
        self.merged = False

    def merge_weights(self) -> None:
        """Let the network compute with merged weights. Do nothing where it does."""
        import torch

        if self.merged:
            return
        self.merged = True
        with torch.no_grad():
            for index, layer in enumerate(self._layers):
                weight = _base_weight(layer)
                merged = _merged_weight(layer)
                if self._in_place:
                    weight.data.copy_(merged)
                else:
                    self._second[index].copy_(merged)
                    self._exchange_weight(index)
                layer.merged_adapters.append("default")

    def restore_weights(self) -> None:
        """Restore the bits of the layers' own weights, so that adapters are computed separately. Do nothing if they
        are."""
        if not self.merged:
            return
        for index, layer in enumerate(self._layers):
            layer.merged_adapters.clear()
            if self._in_place:
                _base_weight(layer).data.copy_(self._second[index], non_blocking=True)
            else:
                self._exchange_weight(index)
        self.merged = False

    def _exchange_weight(self, index: int) -> None:
        """Exchange the memory that a layer computes with for that of the second set."""
        weight = _base_weight(self._layers[index])
        other = self._second[index]
        self._second[index] = weight.data
        weight.data = other


def _base_weight(layer: Any) -> nn.Parameter:
    """Return the own weight of an adapted layer."""
    weight: nn.Parameter = layer.get_base_layer().weight
    return weight


def _merged_weight(layer: Any) -> Tensor:
    """Return W + scale B A of an adapted layer in float32. Who uses it rounds it, once: acting, saving and exporting
    have equal bits then."""
    delta: Tensor = layer.get_delta_weight("default").detach()
    return _base_weight(layer).detach().float() + delta.float()


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, pinned where the tensor is on a GPU."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def _empty_like(tensor: Tensor) -> Tensor:
    import torch

    return torch.empty_like(tensor)


class MergedState:
    """A network's tensors with adapters merged, under the names that they have without adapters. Each tensor is
    computed when it is read, so saving needs no second copy of the network; the network itself is not changed."""

    def __init__(self, network: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Wrap a network.

        Args:
            dtype: precision of the tensors that are read; None: their own.
        """
        self._dtype = dtype
        state = network.state_dict()
        layers = {name.partition(MARK)[0] for name in state if MARK in name}
        self.tensors: dict[str, Tensor] = {
            name.replace(".base_layer.", "."): t for name, t in state.items() if MARK not in name
        }
        """Tensors by name, without the adapters' updates."""
        self._adapted: dict[str, Any] = {f"{name}.weight": network.get_submodule(name) for name in layers}

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor. A sum of weights and update is rounded once, as in `MergedAdapters`."""
        tensor = self.tensors[name].detach()
        merged = _merged_weight(self._adapted[name]) if name in self._adapted else tensor
        return merged.to(self._dtype or tensor.dtype)
