"""Normalisation by lerobot's statistics: actions and state between the simulator's units and the network's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.types import Array
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale


class FeatureScaler:
    """A `FeatureScale` on a device. As in lerobot, eps is added to std only to normalise; empty ranges use eps."""

    def __init__(self, scale: FeatureScale, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.dim = scale.dim
        self._dtype = dtype
        self._end = 1.0 if scale.clip else torch.inf
        values = [torch.tensor(value, dtype=torch.float64) for value in scale.by_step or scale.values]
        shape = values[0].shape if values else (scale.dim,)
        offset, inwards = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        outwards, shift = inwards, torch.zeros_like(offset)
        if scale.mode == "MEAN_STD":
            offset, inwards, outwards = values[0], values[1] + scale.eps, values[1]
        elif values:
            span = values[1] - values[0] + scale.margin
            inwards = outwards = torch.where(span == 0, scale.eps, span) / 2
            offset, shift = values[0], torch.ones_like(offset)
            if scale.flat:
                empty = span == 0
                inwards, outwards = inwards.masked_fill(empty, torch.inf), outwards.masked_fill(empty, 0)
                shift = shift.masked_fill(empty, 0)
        self._offset = offset.to(device, dtype)
        self._in = inwards.to(device, dtype)
        self._out = outwards.to(device, dtype)
        self._shift = shift.to(device, dtype)
        self._on_host = tuple(constant.to(dtype).numpy() for constant in (offset, inwards, shift))

    def normalise_feature(self, x: Tensor, width: int) -> Tensor:
        """Normalise [..., dim] in physical units, padded with zeros to [..., width]."""
        offset, inwards, shift = (self._take_steps(part, x) for part in (self._offset, self._in, self._shift))
        scaled = (x.to(self._dtype) - offset) / inwards - shift
        return F.pad(scaled.clamp(-self._end, self._end), (0, width - self.dim))

    def normalise_on_host(self, x: Array, width: int) -> Array:
        """Return what `normalise_feature` returns on a CPU, to the last bit, for an array."""
        offset, inwards, shift = self._on_host
        scaled = ((x.astype(offset.dtype) - offset) / inwards - shift).clip(-self._end, self._end)
        return np.pad(scaled, [(0, 0)] * (x.ndim - 1) + [(0, width - self.dim)])

    def restore_units(self, x: Tensor) -> Tensor:
        """Un-normalise [..., width] to physical units, [..., dim]."""
        offset, outwards, shift = (self._take_steps(part, x) for part in (self._offset, self._out, self._shift))
        return (x[..., : self.dim].clamp(-self._end, self._end) + shift) * outwards + offset

    def _take_steps(self, part: Tensor, x: Tensor) -> Tensor:
        """Return the rows of the steps that x [..., C, D] begins with, where each step has a scale."""
        return part if part.ndim == 1 else part[: x.shape[-2]]


class GripperScaler(FeatureScaler):
    """Scaler of a last number, the gripper's: 0 closed, 1 open in training, `closed`, `-closed` in simulators."""

    def __init__(self, scale: FeatureScale, closed: int, device: torch.device) -> None:
        super().__init__(scale, device)
        self._closed = closed

    def normalise_feature(self, x: Tensor, width: int) -> Tensor:
        return super().normalise_feature(torch.cat([x[..., :-1], (1 - self._closed * x[..., -1:]) / 2], dim=-1), width)

    def restore_units(self, x: Tensor) -> Tensor:
        actions = super().restore_units(x)
        return torch.cat([actions[..., :-1], self._closed * (1 - 2 * actions[..., -1:]).sign()], dim=-1)


def make_action_scaler(scale: FeatureScale, gripper: str, device: torch.device) -> FeatureScaler:
    """Build the scaler of a flow model's actions, with the conversion that `model.gripper` names."""
    closed = {"libero": 1, "widowx": -1}.get(gripper)
    return FeatureScaler(scale, device) if closed is None else GripperScaler(scale, closed, device)
