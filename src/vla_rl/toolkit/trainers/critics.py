"""Critics of a policy: networks on its features, their losses, and target networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from vla_rl.core.capabilities import HasFeatures
from vla_rl.core.errors import UserError
from vla_rl.toolkit.models.heads import small_mlp
from vla_rl.toolkit.trainers.dummy_samples import dummy_observation
from vla_rl.toolkit.trainers.trained_model import TrainedModel


def check_features(trained: TrainedModel, trainer: str) -> None:
    """Raises UserError for a model without features, on which critics work."""
    if not isinstance(trained.model, HasFeatures):
        raise UserError(
            f"trainer {trainer!r} needs critics on the policy's features, and model {trained.name!r} gives none "
            f"(no vla_rl.HasFeatures); film_resnet does"
        )


@torch.no_grad()
def feature_size(trained: TrainedModel) -> int:
    """Return the size D of the policy's features."""
    return int(trained.policy_features(dummy_observation(trained.info)).shape[1])


class CriticInputs:
    """Inputs of Q-networks: features, and actions scaled to [-1, 1]."""

    def __init__(self, low: Sequence[float], high: Sequence[float], device: torch.device) -> None:
        """Create the scaling of actions with these bounds, [A] each."""
        lowest, highest = (torch.tensor(bounds, device=device) for bounds in (low, high))
        self._middle = (lowest + highest) / 2
        self._half_range = (highest - lowest) / 2

    def __call__(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the inputs [B, D + C A] for features [B, D] and chunks [B, C, A]."""
        return torch.cat([features, self.scale_actions(actions)], dim=1)

    def scale_actions(self, actions: torch.Tensor) -> torch.Tensor:
        """Return chunks [B, C, A] scaled to [-1, 1], [B, C A]."""
        return ((actions - self._middle) / self._half_range).flatten(1)


class Critic(nn.Module):
    """MLP on vectors [B, D] with one output, float32 [B]. Its weights depend on the seed alone and stay in float32.
    `layer_norm` normalises hidden layers, which keeps values of unseen actions from growing (RLPD, Ball et al.
    2023)."""

    def __init__(self, inputs: int, hidden: Sequence[int], *, layer_norm: bool, seed: int) -> None:
        super().__init__()
        self.layers = small_mlp([inputs, *hidden, 1], seed)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in hidden) if layer_norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        for i, layer in enumerate(self.layers[:-1]):
            x = layer(x)
            x = F.relu(x if self.norms is None else self.norms[i](x))
        values: torch.Tensor = self.layers[-1](x).squeeze(-1)
        return values


class CriticEnsemble(nn.Module):
    """Critics with different first weights: values float32 [N, B] of vectors [B, D]."""

    def __init__(self, count: int, inputs: int, hidden: Sequence[int], *, layer_norm: bool, seed: int) -> None:
        super().__init__()
        self.critics = nn.ModuleList(Critic(inputs, hidden, layer_norm=layer_norm, seed=seed + i) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([critic(x) for critic in self.critics])


def expectile_loss(differences: torch.Tensor, expectile: float) -> torch.Tensor:
    """Return |expectile - 1(u < 0)| u^2 of each difference u (IQL, Kostrikov et al. 2021, eq. 4): 0.5 is half of the
    squared error, and towards 1 the value approaches the largest target."""
    weights = torch.where(differences < 0, 1 - expectile, expectile)
    return weights * differences.square()


def advantage_weights(advantages: torch.Tensor, temperature: float, most: float) -> torch.Tensor:
    """Return exp(advantage / temperature), at most `most` (AWR, Peng et al. 2019, eq. 8 and section 4.4)."""
    return torch.exp(advantages / temperature).clamp(max=most)


@torch.no_grad()
def update_target(target: nn.Module, trained: nn.Module, rate: float) -> None:
    """Move a target network towards the trained one: (1 - rate) * target + rate * trained (Polyak averaging)."""
    for slow, fast in zip(target.parameters(), trained.parameters(), strict=True):
        slow.lerp_(fast, rate)
