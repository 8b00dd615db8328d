"""Actions <-> tokens and the statistics that scale them, by OpenVLA's rules.

256 bin edges on [-1, 1] make 255 centres. Token id t means centre clip(V - t - 1, 0, 254), so the two lowest ids mean
the same action. OpenVLA-OFT scales with the 1 % and 99 % quantiles and adds 1e-8 to their distance.
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
class Scale:
    """Affine map of [low, high] onto [-1, 1], dimension by dimension; those not in `mask` pass unchanged."""

    q01: tuple[float, ...]
    q99: tuple[float, ...]
    mask: tuple[bool, ...]

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Scale:
        """From an entry of dataset_statistics.json; without "mask" every dimension is scaled."""
        mask = entry.get("mask") or [True] * len(entry["q01"])
        return cls(q01=tuple(entry["q01"]), q99=tuple(entry["q99"]), mask=tuple(bool(m) for m in mask))

    @classmethod
    def between(cls, low: Sequence[float], high: Sequence[float]) -> Scale:
        return cls(q01=tuple(low), q99=tuple(high), mask=(True,) * len(low))

    @classmethod
    def identity(cls, dim: int) -> Scale:
        return cls(q01=(-1.0,) * dim, q99=(1.0,) * dim, mask=(False,) * dim)

    def entry(self) -> dict[str, list[Any]]:
        return {name: list(value) for name, value in attrs.asdict(self).items()}


class Scaler:
    """A `Scale` on a device, in float64 where the device has it."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.low = torch.tensor(scale.q01, dtype=torch.float64, device=device)
        self.span = torch.tensor(scale.q99, dtype=torch.float64, device=device) - self.low + EPSILON
        self.mask = torch.tensor(scale.mask, device=device)

    def normalise(self, x: Tensor, clip: bool) -> Tensor:
        """[..., D] in physical units -> float64 [..., D]."""
        x = x.double()
        scaled = 2 * (x - self.low) / self.span - 1
        return torch.where(self.mask, scaled.clamp(-1, 1) if clip else scaled, x)

    def restore(self, x: Tensor) -> Tensor:
        """float64 [..., D] in [-1, 1] -> physical units."""
        return torch.where(self.mask, 0.5 * (x + 1) * self.span + self.low, x)


class ActionCodec:
    """Actions in the simulator's units <-> token ids V - bins ... V - 1."""

    def __init__(self, scale: Scale, vocab_end: int, bins: int, device: torch.device) -> None:
        self.action_dim = len(scale.q01)
        self.vocab_end, self.bins = vocab_end, bins
        self.first = vocab_end - bins
        self._scaler = Scaler(scale, device)
        self._edges = torch.linspace(-1, 1, bins, dtype=torch.float64, device=device)
        centres = (self._edges[1:] + self._edges[:-1]) / 2
        self._centres = centres[(bins - 1 - torch.arange(bins, device=device)).clamp(max=bins - 2)]

    def encode(self, actions: Tensor) -> Tensor:
        """[..., A] -> int64 [..., A]."""
        scaled = self._scaler.normalise(actions, clip=False).clamp(-1, 1)
        return self.vocab_end - torch.bucketize(scaled, self._edges, right=True)

    def decode(self, tokens: Tensor) -> Tensor:
        """int64 [..., A] -> float32 [..., A]."""
        return self._scaler.restore(self._centres[(tokens - self.first).clamp(0, self.bins - 1)]).float()
