"""Actions <-> tokens and the statistics that scale them, by OpenVLA's rules.

256 bin edges on [-1, 1] make 255 centres. Token id t means centre clip(V - t - 1, 0, 254), so the two lowest ids mean
the same action. The 1 % and 99 % quantiles scale (in OpenVLA-OFT's ALOHA models the smallest and the largest number);
OpenVLA-OFT adds 1e-8 to their distance both ways, OpenVLA adds it where training normalises and leaves it out where
actions are restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

EPSILON = 1e-8


@frozen(kw_only=True)
class ActionScale:
    """Affine map of [low, high] onto [-1, 1], dimension by dimension; those not in `mask` pass unchanged."""

    q01: tuple[float, ...]
    q99: tuple[float, ...]
    mask: tuple[bool, ...]

    @classmethod
    def read(cls, entry: Mapping[str, Any], ends: tuple[str, str] = ("q01", "q99")) -> ActionScale:
        """From an entry of dataset_statistics.json; without "mask" every dimension is scaled. `ends`: the statistics
        that are taken."""
        low, high = (tuple(entry[name]) for name in ends)
        mask = entry.get("mask") or [True] * len(low)
        return cls(q01=low, q99=high, mask=tuple(bool(m) for m in mask))

    @classmethod
    def between(cls, low: Sequence[float], high: Sequence[float]) -> ActionScale:
        return cls(q01=tuple(low), q99=tuple(high), mask=(True,) * len(low))

    @classmethod
    def identity(cls, dim: int) -> ActionScale:
        return cls(q01=(-1.0,) * dim, q99=(1.0,) * dim, mask=(False,) * dim)

    def entry(self) -> dict[str, list[Any]]:
        return {name: list(value) for name, value in attrs.asdict(self).items()}


class ActionScaler:
    """A `ActionScale` on a device, in float64 where the device has it. `epsilon` is OpenVLA-OFT's, in `restore`."""

    def __init__(self, scale: ActionScale, device: torch.device, epsilon: float = EPSILON) -> None:
        self.low = torch.tensor(scale.q01, dtype=torch.float64, device=device)
        distance = torch.tensor(scale.q99, dtype=torch.float64, device=device) - self.low
        self.span, self._restored = distance + EPSILON, distance + epsilon
        self.mask = torch.tensor(scale.mask, device=device)

    def normalise(self, x: Tensor, clip: bool) -> Tensor:
        """[..., D] in physical units -> float64 [..., D]."""
        x = x.double()
        scaled = 2 * (x - self.low) / self.span - 1
        return torch.where(self.mask, scaled.clamp(-1, 1) if clip else scaled, x)

    def restore(self, x: Tensor) -> Tensor:
        """float64 [..., D] in [-1, 1] -> physical units."""
        return torch.where(self.mask, 0.5 * (x + 1) * self._restored + self.low, x)


class ActionCodec:
    """Actions in the simulator's units <-> token ids V - bins ... V - 1."""

    def __init__(
        self,
        scale: ActionScale,
        vocab_end: int,
        bins: int,
        device: torch.device,
        *,
        epsilon: float = EPSILON,
        gripper: str = "keep",
    ) -> None:
        self.action_dim = len(scale.q01)
        self.vocab_end, self.bins = vocab_end, bins
        self.first = vocab_end - bins
        self._gripper = gripper
        self._scaler = ActionScaler(scale, device, epsilon)
        self._edges = torch.linspace(-1, 1, bins, dtype=torch.float64, device=device)
        centres = (self._edges[1:] + self._edges[:-1]) / 2
        self._centres = centres[(bins - 1 - torch.arange(bins, device=device)).clamp(max=bins - 2)]

    def normalise(self, actions: Tensor) -> Tensor:
        """[..., A] in the simulator's units -> float64 [..., A]; what is scaled lies in [-1, 1]."""
        if self._gripper == "rlds":
            actions = torch.cat([actions[..., :-1], (1 - actions[..., -1:]) / 2], dim=-1)
        return self._scaler.normalise(actions, clip=True)

    def restore(self, actions: Tensor) -> Tensor:
        """float64 [..., A] as the model says them -> float32 [..., A] in the simulator's units."""
        restored = self._scaler.restore(actions)
        if self._gripper == "rlds":
            restored = torch.cat([restored[..., :-1], -torch.sign(2 * restored[..., -1:] - 1)], dim=-1)
        return restored.float()

    def encode(self, actions: Tensor) -> Tensor:
        """[..., A] -> int64 [..., A]."""
        return self.vocab_end - torch.bucketize(self.normalise(actions).clamp(-1, 1), self._edges, right=True)

    def decode(self, tokens: Tensor) -> Tensor:
        """int64 [..., A] -> float32 [..., A]. Any other token means the action token that is nearest by its id."""
        return self.restore(self._centres[(tokens - self.first).clamp(0, self.bins - 1)])
