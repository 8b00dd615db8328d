"""Low-rank adapters (Hu et al. 2021) through peft, shared by model plugins. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import Attribute, field, frozen
from attrs.validators import ge, gt, in_, lt, optional

from vla_rl.core.errors import CheckpointError, UserError

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from torch import Tensor, nn

FROZEN_WEIGHTS = ("bf16", "fp8", "int8", "nf4")
"""Values of `model.frozen_weights`."""
MERGES = ("off", "in_place", "copy")
MARK = ".lora_"
"""Infix of the names of adapter parameters, after the name of their layer."""
TRAINED, START = "default", "start"
"""Names that peft keeps the adapters of a layer under: the trained one, and a frozen copy of what was loaded."""


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
    (`policy/recompute_kl`). With `frozen_weights: int8` or `nf4`: copy, whose second set is in full precision."""

    @property
    def effective_alpha(self) -> float:
        return min(self.rank, 16) if self.alpha is None else self.alpha


def check_frozen_weights(config: Any, attribute: Attribute[Any], value: str) -> None:
    """Validate `frozen_weights`: what is not frozen cannot have fewer bits, as acting computes as learning does."""
    if value == "bf16":
        return
    if config.lora is None and not getattr(config, "train_expert_only", False):
        frozen_by = "train_expert_only: true or lora: {}" if hasattr(config, "train_expert_only") else "lora: {}"
        raise ValueError(
            f"{value} stores weights that are not trained, and with these settings the backbone is trained; set "
            f"{frozen_by}, or leave frozen_weights out"
        )
    problem = MERGE_PROBLEMS.get((value, merge_mode(config)))
    if problem is not None:
        raise ValueError(f"{value} does not go with lora.merge_for_acting: {merge_mode(config)}, {problem}")


MERGE_PROBLEMS = {
    **{
        (kind, "in_place"): "which overwrites weights in their stored type, and merged ones are in full precision; "
        "use copy, or off (acting then needs no second set)"
        for kind in ("int8", "nf4")
    },
    **{
        ("fp8", mode): "because acting would compute in full precision and learning in FP8, so that their log-probs "
        "differ by more than rounding; use off"
        for mode in ("in_place", "copy")
    },
}
"""(frozen_weights, merge_for_acting) -> why they are refused together."""


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
    """Seed PyTorch's global generators, of the CPU and of that device, inside the block; then they are as before."""
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


def check_adapter(source: Path, rank: int, alpha: float, config: LoRAConfig | None, otherwise: str) -> None:
    """Raise CheckpointError when the spec describes another adapter than the one in a folder.

    Args:
        otherwise: what else to do than to set `model.lora` to it.
    """
    if config is not None and (config.rank, config.effective_alpha) == (rank, alpha):
        return
    exact = repr(alpha).removesuffix(".0")
    wanted = "none" if config is None else f"rank {config.rank} and alpha {config.effective_alpha:g}"
    raise CheckpointError(
        f"{source} holds an adapter of rank {rank} and alpha {exact}, the spec asks for {wanted}; set model.lora: "
        f"{{rank: {rank}, alpha: {exact}}} to train it on, or {otherwise}"
    )


def keep_start(layer: Any) -> None:
    """Keep a frozen copy of the adapter that a layer has now, for the reference policy."""
    for parts in (layer.lora_A, layer.lora_B, layer.lora_dropout):
        parts[START] = deepcopy(parts[TRAINED]).requires_grad_(False)
    layer.scaling[START] = layer.scaling[TRAINED]


@contextmanager
def before_training(module: nn.Module, **parts: nn.Module | None) -> Iterator[None]:
    """Compute with the adapters that were loaded, or none, inside the block, and put `parts` in place of the module's.
    This is the policy before training without a copy of the weights. Afterwards adapters are as they were."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    if any(layer.merged for layer in layers):  # peft would subtract the update, which does not restore the bits
        raise RuntimeError("the policy before training cannot be scored while adapters are merged")
    enabled = [layer for layer in layers if not layer.disable_adapters]
    trained = {p for layer in enabled for p in layer.parameters() if p.requires_grad}
    trained_parts = {name: getattr(module, name) for name in parts}
    try:
        for name, part in parts.items():
            setattr(module, name, part)
        for layer in enabled:
            if START in layer.lora_A:
                layer.set_adapter(START)
            else:
                layer.enable_adapters(False)
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)  # peft makes all adapters trainable
            layer.set_adapter(TRAINED)
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


def frozen_storage(config: Any) -> str:
    """Return `frozen_weights` of a model's settings; "bf16" for a model that has no such key."""
    return str(getattr(config, "frozen_weights", "bf16"))


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
    the device, and only pointers change. Layers that store their weights in fewer bits (`frozen_weights`) take "copy".
    """

    def __init__(self, network: nn.Module, mode: str) -> None:
        """Find the adapted layers, and copy their weights. Raise UserError without adapted layers."""
        self._layers = adapted_layers(network)
        if not self._layers:
            raise UserError("lora.merge_for_acting: no layer of the network has an adapter; leave it out")
        self._in_place = mode == "in_place"
        self._second: list[Any] = [
            _host_copy(layer.get_base_layer().weight.data) if self._in_place else _empty_weight(layer)
            for layer in self._layers
        ]
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
                merged = _merged_weight(layer)
                if self._in_place:
                    layer.get_base_layer().weight.data.copy_(merged)
                else:
                    self._second[index].copy_(merged)
                    self._exchange_weight(index)
                layer.merged_adapters.append(TRAINED)

    def restore_weights(self) -> None:
        """Restore the bits of the layers' own weights, if needed, so that adapters are computed separately."""
        if not self.merged:
            return
        for index, layer in enumerate(self._layers):
            layer.merged_adapters.clear()
            if self._in_place:
                layer.get_base_layer().weight.data.copy_(self._second[index], non_blocking=True)
            else:
                self._exchange_weight(index)
        self.merged = False

    def _exchange_weight(self, index: int) -> None:
        """Exchange the memory that a layer computes with for that of the second set."""
        from vla_rl.toolkit.models.frozen_weights import FrozenLinear

        base = self._layers[index].get_base_layer()
        other = self._second[index]
        if isinstance(base, FrozenLinear):  # computes with its stored weight where `merged` is None
            self._second[index] = base.merged
            base.merged = other
        else:
            self._second[index] = base.weight.data
            base.weight.data = other


def _merged_weight(layer: Any) -> Tensor:
    """Return W + scale B A of an adapted layer in float32. Users round it once, for equal bits."""
    from vla_rl.toolkit.models.frozen_weights import read_weight

    delta: Tensor = layer.get_delta_weight(TRAINED).detach()
    return read_weight(layer.get_base_layer()).float() + delta.float()


def merged_bytes(network: nn.Module) -> int:
    """Return the bytes of the adapted layers' weights in full precision: those of a merged second set."""
    return sum(_empty_weight(layer, "meta").nbytes for layer in adapted_layers(network))


def _empty_weight(layer: Any, device: str | None = None) -> Tensor:
    """Return memory for the weight of an adapted layer in full precision, on its device or another one."""
    import torch

    from vla_rl.toolkit.models.frozen_weights import FrozenLinear

    base = layer.get_base_layer()
    if isinstance(base, FrozenLinear):
        return torch.empty(base.shape, dtype=base.dtype, device=device or base.stored.device)
    return torch.empty_like(base.weight.data, device=device)


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, pinned where the tensor is on a GPU."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


class MergedState:
    """A network's tensors with adapters merged, under the names that they have without adapters. Each tensor is
    computed when it is read, so saving needs no second copy of the network; the network itself is not changed."""

    def __init__(self, network: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Wrap a network.

        Args:
            dtype: precision of the tensors that are read; None: their own.
        """
        import torch

        from vla_rl.toolkit.models.frozen_weights import FrozenLinear

        self._dtype = dtype
        stored = {name: part for name, part in network.named_modules() if isinstance(part, FrozenLinear)}
        packed = {f"{name}.{part}" for name in stored for part in ("stored", "scales")}
        state = {name: tensor for name, tensor in network.state_dict().items() if name not in packed}
        for name, layer in stored.items():
            state[f"{name}.weight"] = torch.empty(layer.shape, dtype=layer.dtype, device="meta")
        layers = {name.partition(MARK)[0] for name in state if MARK in name}
        self.tensors: dict[str, Tensor] = {
            name.replace(".base_layer.", "."): t for name, t in state.items() if MARK not in name
        }
        """Tensors by name, without the adapters' updates; on the meta device those that are stored in fewer bits."""
        self._adapted: dict[str, Any] = {f"{name}.weight": network.get_submodule(name) for name in layers}
        self._stored = {f"{name}.weight": layer for name, layer in stored.items() if not name.endswith(".base_layer")}

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in full precision. A sum of weights and update is rounded once, as in `MergedAdapters`."""
        tensor = self.tensors[name].detach()
        if name in self._adapted:
            read = _merged_weight(self._adapted[name])
        else:
            read = self._stored[name].read_weight() if name in self._stored else tensor
        return read.to(self._dtype or tensor.dtype)
