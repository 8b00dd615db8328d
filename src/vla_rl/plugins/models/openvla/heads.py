"""Parts beside the public network: the state's token, the critic, and the module that holds everything trainable."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction


class ProprioProjector(nn.Module):
    """State [B, S] -> one embedding [B, 1, D]; keys of OpenVLA-OFT's `proprio_projector--*_checkpoint.pt`."""

    def __init__(self, state_dim: int, llm_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(state))).unsqueeze(1)


class ValueHead(nn.Module):
    """Critic on a hidden state [B, D] -> float32 [B] or, where `outputs` is a number, [B, outputs].

    Its weights stay in float32. The last layer has no bias and starts small, so that values start near 0.
    """

    def __init__(self, dim: int, hidden: tuple[int, ...], outputs: int | None, detach: bool, seed: int) -> None:
        super().__init__()
        self.outputs, self.detach = outputs, detach
        widths = [dim, *hidden, outputs or 1]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=i < len(hidden)) for i, (a, b) in enumerate(pairwise(widths)))
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in self.layers:
                std = (0.01 if layer is self.layers[-1] else math.sqrt(2.0)) / math.sqrt(layer.in_features)
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=rng) * std)
                if layer.bias is not None:
                    layer.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        x = (hidden.detach() if self.detach else hidden).float()
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        x = self.layers[-1](x)
        return x.squeeze(-1) if self.outputs is None else x


def public_network(model: nn.Module) -> OpenVLAForActionPrediction:
    """The network inside adapters, or the network itself."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(inner, OpenVLAForActionPrediction)
    return inner


class OFTModule(nn.Module):
    """All parameters of a policy; one forward pass gives action logits and values."""

    def __init__(
        self, vla: OpenVLAForActionPrediction, proprio_projector: ProprioProjector | None, value_head: ValueHead | None
    ) -> None:
        super().__init__()
        self.vla: nn.Module = vla
        self.proprio_projector = proprio_projector
        self.value_head = value_head

    def forward(
        self,
        pixels: Tensor,
        state: Tensor | None,
        ids: Tensor,
        mask: Tensor | None,
        blank: Tensor,
        start: Tensor,
        reads: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read `reads` successive positions, the first one being the last prompt token.

        Args:
            pixels: [B, 6 * images, H, W].   state: normalised [B, S] or None.
            ids, mask, blank: [B, L], see `OpenVLAForActionPrediction.forward`.
            start: int64 [B], index of the last prompt token in `ids`.   reads: 0 for values only.
        Returns:
            float32 logits [B, reads, bins] (None without reads) and values [B] | [B, C] (None without critic).
        """
        extra = None
        if self.proprio_projector is not None and state is not None:
            extra = self.proprio_projector(state)
        hidden = self.vla(pixels, ids, attention_mask=mask, blank=blank, extra=extra)
        first = start + hidden.shape[1] - ids.shape[1]
        rows = torch.arange(len(hidden), device=hidden.device)
        values = None if self.value_head is None else self.value_head(hidden[rows, first])
        if not reads:
            return None, values
        positions = first[:, None] + torch.arange(reads, device=hidden.device)
        return public_network(self.vla).action_logits(hidden[rows[:, None], positions]).float(), values
