"""Parts of networks that denoise a chunk of actions beside a prefix (images, instruction, state) that is computed
once and lent to every denoising step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.heads import HorizonValueHead, NoiseHead, PrefixValueHead
from vla_rl.toolkit.models.networks import Normal, sine_cosine_positions


class TimeEmbedding(nn.Module):
    """Sines and cosines of the time in float64, as openpi and lerobot have it; transformers' own are float32, which
    moves the samples by 1e-4."""

    def __init__(self, width: int, low: float, high: float) -> None:
        super().__init__()
        self.pairs, self.low, self.high = width // 2, low, high

    def forward(self, time: Tensor) -> Tensor:
        """float [B] -> float32 [B, D]."""
        angle = time.double()[:, None] * _frequencies(self.pairs, self.low, self.high, time.device)
        return torch.cat([angle.sin(), angle.cos()], dim=1).float()


@lru_cache
def _frequencies(pairs: int, low: float, high: float, device: torch.device) -> Tensor:
    """float64 [pairs] on the device."""
    fraction = torch.linspace(0, 1, pairs, dtype=torch.float64, device=device)
    return 2 * math.pi / (low * (high / low) ** fraction)


class LentCache(DynamicCache):
    """The prefix's keys and values, lent to one pass after the other: the suffix is seen and not kept, so nothing has
    to be cropped and no pass holds another one's graph."""

    def __init__(self, source: DynamicCache) -> None:
        super().__init__()
        layers: list[Any] = source.layers
        self.pairs: list[tuple[Tensor, Tensor]] = [(layer.keys, layer.values) for layer in layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.pairs[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


def mean_over(hidden: Tensor, counted: Tensor) -> Tensor:
    """[B, P, D] and bool [B, P] -> float32 [B, D], over the rows that count."""
    weights = counted.float()[..., None]
    return (hidden.float() * weights).sum(1) / weights.sum(1)


def freeze_unused(language: Any) -> None:
    """Parts of a language model behind its last keys and values: computed, and without influence on the expert."""
    last = language.layers[-1]
    for part in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp, last.post_attention_layernorm, language.norm):
        part.requires_grad_(False)


def initialise(network: nn.Module, seed: int, rms: float) -> None:
    """Random weights by `networks.initialise`: sine-cosine patch positions of a size that is seen beside the patches, a
    velocity that starts near 0. `rms`: what RMS norms begin with."""

    def other(name: str, module: nn.Module, normal: Normal) -> None:
        weight: Any = getattr(module, "weight", None)
        if name.endswith("position_embedding"):
            weight.copy_(0.5 * sine_cosine_positions(*weight.shape))
        elif isinstance(module, nn.Embedding):  # multiplied by the root of the width
            normal(weight, 0.5 * module.embedding_dim**-0.5)
        elif isinstance(module, nn.LayerNorm):
            weight.fill_(1.0)
        elif type(module).__name__.endswith("RMSNorm"):
            weight.fill_(rms)

    networks.initialise(network, seed, "action_out_proj", other)


class Lent(Protocol):
    """What a prefix has beside what its own network reads."""

    @property
    def summary(self) -> Tensor | None:
        """float32 [B, D] of a critic that reads the prefix."""


class FlowModule(nn.Module, ABC):
    """All parameters of a policy."""

    def __init__(
        self,
        shape: tuple[int, int],
        value_head: HorizonValueHead | PrefixValueHead | None,
        noise_head: NoiseHead | None,
    ) -> None:
        super().__init__()
        self.shape = shape
        """Actions in a denoised chunk and numbers in an action, padding included."""
        self.value_head, self.noise_head = value_head, noise_head

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """What a checkpoint holds: all but the heads."""

    @abstractmethod
    def denoise(self, prefix: Any, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """The expert's output for the action tokens.

        Args:
            state: normalised [B, S].   x: noisy actions [B, H, A].   time: [B], 1 for noise, 0 for actions.
        Returns: float32 [B, H, D].
        """

    @abstractmethod
    def velocity(self, hidden: Tensor) -> Tensor:
        """[B, H, D] -> [B, H, A]: from actions to noise."""

    def flow_matching(self, prefix: Any, state: Tensor, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Squared errors [B, H, A] of the velocity at these times ([B]), for normalised actions."""
        t = time[:, None, None]
        velocity = self.velocity(self.denoise(prefix, state, t * noise + (1 - t) * actions, time))
        return (noise - actions - velocity) ** 2

    def criticise(self, prefix: Lent, state: Tensor) -> Tensor | None:
        """Values [B] or [B, C], or None without a critic.

        A critic on the expert reads the mean of the initial noise (x = 0 at t = 1) or, as pi_RL, all that is denoised
        from it, and is averaged. RLinf takes the chunks that it samples; values here depend on the observation alone.
        """
        head = self.value_head
        if head is None:
            return None
        if isinstance(head, PrefixValueHead):
            assert prefix.summary is not None
            values: Tensor = head(prefix.summary.detach() if head.detach else prefix.summary)
            return values
        x, found = state.new_zeros(len(state), *self.shape), []
        for i in range(head.passes):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not head.detach):
                hidden = self.denoise(prefix, state, x, state.new_full((len(state),), 1 - i / head.passes))
            found.append(head(hidden))
            if i + 1 < head.passes:
                with torch.no_grad():
                    x = x - self.velocity(hidden) / head.passes
        return found[0] if head.passes == 1 else torch.stack(found).mean(0)
