"""Conversion between actions and tokens, and the statistics that scale actions, by OpenVLA's rules.

256 bin edges on [-1, 1] make 255 centres. Token id t means centre clip(V - t - 1, 0, 254), so the two lowest ids mean
the same action. The 1 % and 99 % quantiles define the scale (in OpenVLA-OFT's ALOHA models minimum and maximum).
OpenVLA-OFT adds 1e-8 to their distance in both directions, OpenVLA when normalising for training but not when
restoring actions.
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
    """Affine map of [low, high] onto [-1, 1] per dimension; dimensions outside of `mask` are unchanged."""

    q01: tuple[float, ...]
    q99: tuple[float, ...]
    mask: tuple[bool, ...]

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], ends: tuple[str, str] = ("q01", "q99")) -> ActionScale:
        """Return the scale in an entry of dataset_statistics.json; without "mask" every dimension is scaled. `ends`:
        names of the two statistics to use."""
        low, high = (tuple(entry[name]) for name in ends)
        mask = entry.get("mask") or [True] * len(low)
        return cls(q01=low, q99=high, mask=tuple(bool(m) for m in mask))

    @classmethod
    def from_bounds(cls, low: Sequence[float], high: Sequence[float]) -> ActionScale:
        return cls(q01=tuple(low), q99=tuple(high), mask=(True,) * len(low))

    @classmethod
    def identity_scale(cls, dim: int) -> ActionScale:
        return cls(q01=(-1.0,) * dim, q99=(1.0,) * dim, mask=(False,) * dim)

    def to_entry(self) -> dict[str, list[Any]]:
        return {name: list(value) for name, value in attrs.asdict(self).items()}


class ActionScaler:
    """Applies an `ActionScale` on a device, in float64. `epsilon` is added to the range in `restore_actions`."""

    def __init__(self, scale: ActionScale, device: torch.device, epsilon: float = EPSILON) -> None:
        self.low = torch.tensor(scale.q01, dtype=torch.float64, device=device)
        distance = torch.tensor(scale.q99, dtype=torch.float64, device=device) - self.low
        # Two ranges, as OpenVLA restores actions without the epsilon with which it was trained.
        self.span = distance + EPSILON
        self._restored = distance + epsilon
        self.mask = torch.tensor(scale.mask, device=device)

    def normalise_values(self, x: Tensor, clip: bool) -> Tensor:
        """Return x [..., D] in physical units as float64 [..., D], scaled."""
        x = x.double()
        scaled = 2 * (x - self.low) / self.span - 1
        return torch.where(self.mask, scaled.clamp(-1, 1) if clip else scaled, x)

    def restore_values(self, x: Tensor) -> Tensor:
        """Return float64 x [..., D] in [-1, 1] in physical units."""
        return torch.where(self.mask, 0.5 * (x + 1) * self._restored + self.low, x)


class ActionCodec:
    """Converts between actions in the simulator's units and token ids V - bins ... V - 1."""

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
        self.vocab_end = vocab_end
        self.bins = bins
        self.first = vocab_end - bins
        self._gripper = gripper
        self._scaler = ActionScaler(scale, device, epsilon)
        self._edges = torch.linspace(-1, 1, bins, dtype=torch.float64, device=device)
        centres = (self._edges[1:] + self._edges[:-1]) / 2
        self._centres = centres[(bins - 1 - torch.arange(bins, device=device)).clamp(max=bins - 2)]

    def normalise_actions(self, actions: Tensor) -> Tensor:
        """Return actions [..., A] in the simulator's units as float64 [..., A]; scaled dimensions are in [-1, 1]."""
        # In the data an open gripper is 1; in the simulator it is -1 (rlds) or 1 (widowx).
        if self._gripper == "rlds":
            actions = torch.cat([actions[..., :-1], (1 - actions[..., -1:]) / 2], dim=-1)
        elif self._gripper == "widowx":
            actions = torch.cat([actions[..., :-1], (1 + actions[..., -1:]) / 2], dim=-1)
        return self._scaler.normalise_values(actions, clip=True)

    def restore_actions(self, actions: Tensor) -> Tensor:
        """Return the model's actions, float64 [..., A], in the simulator's units, float32 [..., A]."""
        restored = self._scaler.restore_values(actions)
        if self._gripper == "rlds":
            restored = torch.cat([restored[..., :-1], -torch.sign(2 * restored[..., -1:] - 1)], dim=-1)
        elif self._gripper == "widowx":
            restored = torch.cat([restored[..., :-1], 2.0 * (restored[..., -1:] > 0.5) - 1], dim=-1)
        return restored.float()

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Return the token ids of actions [..., A], int64 [..., A]."""
        return self.vocab_end - torch.bucketize(self.normalise_actions(actions).clamp(-1, 1), self._edges, right=True)

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Return the actions of token ids int64 [..., A], float32 [..., A]. Any other token means the action token with
        the nearest id."""
        return self.restore_actions(self._centres[(tokens - self.first).clamp(0, self.bins - 1)])
