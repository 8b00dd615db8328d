"""Low-rank adapters through peft: wrap the network, and write it back merged under its public names."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from vla_rl.plugins.models.openvla.config import LoRAConfig
from vla_rl.plugins.models.openvla.heads import public_network
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction


def add_adapters(model: OpenVLAForActionPrediction, config: LoRAConfig, freeze_vision: bool, seed: int) -> nn.Module:
    """Adapters on every linear layer that is computed, except the head; everything else is frozen.

    Initialisation is a function of the seed; PyTorch's global generator is left as it was.
    """
    vits = (model.vision_backbone.featurizer, model.vision_backbone.fused_featurizer)
    roots = [model.vision_backbone] if freeze_vision else [part for vit in vits for part in vit.unused()]
    idle = {id(part) for root in roots for part in root.modules() if isinstance(part, nn.Linear)}
    skipped = [name for name, part in model.named_modules() if id(part) in idle]
    alpha: Any = min(config.rank, 16) if config.alpha is None else config.alpha
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules="all-linear",
        exclude_modules=skipped,
        init_lora_weights="gaussian",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, lora)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The network's tensors under their public names, adapters added in; the model itself is not changed."""
    network = public_network(model)
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        if ".lora_" not in name:
            state[name.replace(".base_layer.", ".")] = tensor
    with torch.no_grad():
        for name, part in network.named_modules():
            if isinstance(part, LoraLayer):
                key = f"{name}.weight"
                state[key] = state[key] + part.get_delta_weight("default").to(state[key].dtype)
    return state
