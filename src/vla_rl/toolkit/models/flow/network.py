"""Parts of networks that denoise a chunk given a prefix (images, instruction, state), computed once for all steps; and
the steering head, which chooses the initial noise that the frozen policy denoises: Wagenmaker et al. 2025, "Steering
Your Diffusion Policy with Latent Space Reinforcement Learning" (arXiv 2506.15799)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.core.types import ArrayOrTensor
from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.flow.config import SteeringConfig
from vla_rl.toolkit.models.heads import HorizonValueHead, NoiseHead, PrefixValueHead, small_mlp
from vla_rl.toolkit.models.networks import (
    Normal,
    as_tensor,
    pack_bfloat16,
    sine_cosine_positions,
    unpack_bfloat16,
)
from vla_rl.toolkit.models.squashed_gaussian import SquashedGaussian

VALID, PAIRS, HIDDEN = RECORDED = ("backbone_valid", "backbone_pairs", "backbone_hidden")
"""Names of a `BackboneFeatures` in `Chunk.extras`."""


class TimeEmbedding(nn.Module):
    """Sines and cosines of time in float64, as openpi and lerobot: in float32 (transformers) samples move by 1e-4."""

    def __init__(self, width: int, low: float, high: float) -> None:
        super().__init__()
        fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64)
        self.frequencies = nn.Buffer(2 * math.pi / (low * (high / low) ** fraction), persistent=False)
        """Angular frequencies, float64 [D / 2]."""

    def forward(self, time: Tensor) -> Tensor:
        """Embed times, float [B], as float32 [B, D]."""
        angle = time.double()[:, None] * self.frequencies
        return torch.cat([angle.sin(), angle.cos()], dim=1).float()


def mean_over(hidden: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of [B, P, D] over the tokens where `counted` (bool [B, P]), float32 [B, D]."""
    weights = counted.float()[..., None]
    return (hidden.float() * weights).sum(1) / weights.sum(1)


def freeze_unused(language: Any) -> None:
    """Freeze the parts of a language model after its last keys and values. They do not influence the expert."""
    last = language.layers[-1]
    for part in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp, last.post_attention_layernorm, language.norm):
        part.requires_grad_(False)


def initialise_flow(network: nn.Module, seed: int, rms: float) -> None:
    """Set random weights by `networks.initialise_network`: sine-cosine patch positions of a visible size compared with
    the patches, and a velocity that starts near 0. `rms` is the initial weight of RMS norms."""

    def initialise_other(name: str, module: nn.Module, normal: Normal) -> None:
        weight: Any = getattr(module, "weight", None)
        if name.endswith("position_embedding"):
            weight.copy_(0.5 * sine_cosine_positions(*weight.shape))
        elif isinstance(module, nn.Embedding):  # multiplied by the root of the width
            normal(weight, 0.5 * module.embedding_dim**-0.5)
        elif isinstance(module, nn.LayerNorm):
            weight.fill_(1.0)
        elif type(module).__name__.endswith("RMSNorm"):
            weight.fill_(rms)

    networks.initialise_network(network, seed, "action_out_proj", initialise_other)


@frozen(eq=False)
class BackboneFeatures:
    """What the rest of a policy reads of the vision-language model's pass over images and prompt."""

    valid: Tensor
    """bool [B, P], False for tokens that are not attended to."""
    pairs: Sequence[tuple[Tensor, Tensor]] = ()
    """Keys and values of each layer, [B, kv heads, P, D]."""
    hidden: Tensor | None = None
    """What is read of the last layer, [B, ...]; None: nothing."""

    def pack(self, padding: int = 0) -> dict[str, Tensor]:
        """Return the same as `Chunk.extras`, with tokens appended that are not attended to."""
        packed = {VALID: F.pad(self.valid, (0, padding))}
        if self.pairs:
            stacked = torch.stack([tensor for pair in self.pairs for tensor in pair], dim=1)
            packed[PAIRS] = pack_bfloat16(F.pad(stacked, (0, 0, 0, padding)))
        if self.hidden is not None:
            packed[HIDDEN] = pack_bfloat16(self.hidden)
        return packed

    @classmethod
    def unpack(cls, extras: Mapping[str, ArrayOrTensor], device: torch.device) -> BackboneFeatures | None:
        """Return what `pack` wrote; None where it did not."""
        if VALID not in extras:
            return None
        tensors = {name: unpack_bfloat16(as_tensor(extras[name], device)) for name in RECORDED if name in extras}
        rows = tensors[PAIRS].unbind(1) if PAIRS in tensors else ()
        return cls(tensors[VALID], list(zip(rows[::2], rows[1::2], strict=True)), tensors.get(HIDDEN))


Heads = tuple[HorizonValueHead | PrefixValueHead | None, NoiseHead | None]
"""Critic and Flow-Noise's network of a policy."""


class Lent(Protocol):
    """Part of a prefix that is read outside its own network."""

    @property
    def summary(self) -> Tensor | None:
        """Input of a critic that reads the prefix, float32 [B, D]; else None."""


class FlowModule(nn.Module, ABC):
    """A module with all parameters of a policy."""

    def __init__(
        self,
        shape: tuple[int, int],
        value_head: HorizonValueHead | PrefixValueHead | None = None,
        noise_head: NoiseHead | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        """Actions in a denoised chunk and numbers in an action, padding included."""
        self.value_head = value_head
        self.noise_head = noise_head
        self.steering: SteeringHead | None = None

    def attach_steering(self, head: SteeringHead) -> None:
        """Let a head choose the initial noise, and freeze the network."""
        self.steering = head
        self.network.requires_grad_(False)

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """Part of the module that a checkpoint holds: all but the heads."""

    @abstractmethod
    def run_backbone(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> BackboneFeatures:
        """Run the vision-language model. No trained weight influences the result with `train_expert_only`.

        Args:
            pixels: [B, cameras, 3, S, S] in [-1, 1].
            ids: prompts, int64 [B, L].
            mask: bool [B, L], False at padding.
        """

    @abstractmethod
    def build_prefix(self, seen: BackboneFeatures, state: Tensor) -> Any:
        """Return the expert's inputs that do not change with time, of `run_backbone`'s result and the state [B, S]."""

    def prepare_steps(self, prefix: Any, times: Tensor) -> Sequence[Any]:
        """Return the prefix for each pass of a decision, whose times are [K]; a network may compute there what depends
        on the times alone."""
        return [prefix] * len(times)

    @abstractmethod
    def run_expert(self, prefix: Any, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return the expert's output for the action tokens.

        Args:
            state: normalised [B, S].
            x: noisy actions [B, H, A].
            time: [B], 1 for noise, 0 for actions.

        Returns: float32 [B, H, D].
        """

    def run_expert_and_critic(
        self, prefix: Any, state: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `run_expert` and `estimate_values` do. A network may share a pass between both."""
        return self.run_expert(prefix, state, x, time), self.estimate_values(prefix, state)

    @abstractmethod
    def project_velocity(self, hidden: Tensor) -> Tensor:
        """Return the velocity [B, H, A], from actions to noise, of the expert's output [B, H, D]."""

    def flow_matching(self, prefix: Any, state: Tensor, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return the squared errors [B, H, A] of the velocity at these times ([B]), for normalised actions."""
        t = time[:, None, None]
        velocity = self.project_velocity(self.run_expert(prefix, state, t * noise + (1 - t) * actions, time))
        return (noise - actions - velocity) ** 2

    def estimate_values(self, prefix: Lent, state: Tensor) -> Tensor | None:
        """Return values [B] or [B, C], or None without a critic. A critic on the expert reads the expert's output for
        the mean of the initial noise (x = 0 at t = 1) or, as in pi_RL, averages over all denoising steps from there.
        RLinf takes the sampled chunks; values here depend on the observation alone."""
        head = self.value_head
        if head is None:
            return None
        if isinstance(head, PrefixValueHead):
            assert prefix.summary is not None
            values: Tensor = head(prefix.summary.detach() if head.detach else prefix.summary)
            return values
        x, values_of_passes = state.new_zeros(len(state), *self.shape), []
        for i in range(head.passes):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not head.detach):
                hidden = self.run_expert(prefix, state, x, state.new_full((len(state),), 1 - i / head.passes))
            values_of_passes.append(head(hidden))
            if i + 1 < head.passes:
                with torch.no_grad():
                    x = x - self.project_velocity(hidden) / head.passes
        return values_of_passes[0] if head.passes == 1 else torch.stack(values_of_passes).mean(0)


class SteeringHead(nn.Module):
    """MLP from the policy's features [B, D] to squashed Gaussians [B, R, W] of the initial noise. Its weights are
    float32 and depend on the seed alone; the first means are about 0, the noise of a greedy policy."""

    range: Tensor

    def __init__(self, inputs: int, shape: tuple[int, int], config: SteeringConfig, seed: int) -> None:
        """Create the head.

        Args:
            inputs: D, numbers of the features.
            shape: actions of a denoised chunk, and numbers of an action.
        """
        super().__init__()
        horizon, width = shape
        self.shape = (horizon if config.per_action else 1, width)
        """R, W: noise vectors, and numbers of one."""
        self.horizon = horizon
        self.norm = nn.LayerNorm(inputs)
        self.layers = small_mlp([inputs, *config.hidden, 2 * self.shape[0] * width], seed)
        self.register_buffer("range", torch.tensor(config.range, dtype=torch.float64))

    def forward(self, features: Tensor, temperature: float = 1.0) -> SquashedGaussian:
        x = self.norm(features.float())
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return SquashedGaussian.of_outputs(self.layers[-1](x).unflatten(1, (*self.shape, 2)), temperature)

    def initial_noise(self, unsquashed: Tensor) -> Tensor:
        """Return the initial noise [B, H, W] of unsquashed samples [B, R, W]; one vector is repeated over the chunk."""
        return (self.range * torch.tanh(unsquashed)).expand(-1, self.horizon, -1)


def saved_settings(saved: dict[str, Tensor], width: int) -> SteeringConfig:
    """Return the settings of a head with these weights. Raises KeyError or ValueError where they are none."""
    layers = sum(name.startswith("layers.") and name.endswith(".weight") for name in saved)
    outputs = [len(saved[f"layers.{i}.weight"]) for i in range(layers)]
    return SteeringConfig(
        range=float(saved["range"]),
        hidden=tuple(outputs[:-1]),
        per_action=outputs[-1] > 2 * width if outputs else False,
    )
