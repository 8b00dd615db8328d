"""Whether data and weights are the same, number for number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from vla_rl.core.types import Array, to_numpy

Weights = Mapping[str, torch.Tensor]


def same_data(one: Any, other: Any) -> bool:
    """Return whether two nested data hold the same numbers and texts."""
    parts, others = _flatten(one), _flatten(other)
    return len(parts) == len(others) and all(
        a == b if isinstance(a, str) else np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(parts, others, strict=True)
    )


def _flatten(data: Any) -> list[Array | str]:
    """Return all arrays and texts in nested data."""
    if isinstance(data, np.ndarray | torch.Tensor):
        return [to_numpy(data)]
    parts: list[Any] = []
    if attrs.has(type(data)):
        parts = [getattr(data, field.name) for field in attrs.fields(type(data))]
    elif isinstance(data, Mapping):
        parts = [part for key in sorted(data) for part in (str(key), data[key])]
    elif isinstance(data, list | tuple):
        parts = list(data)
    return [data] if isinstance(data, str) else [array for part in parts for array in _flatten(part)]


def copy_weights(module: nn.Module | None) -> dict[str, torch.Tensor]:
    """Return copies of a network's weights and buffers by name."""
    return {} if module is None else {name: t.detach().clone() for name, t in module.state_dict().items()}


def differing_weights(one: Weights, other: Weights) -> list[str]:
    """Return the names of tensors of the first that the second has not, or has with other numbers."""
    return [name for name, t in one.items() if name not in other or not torch.equal(t, other[name].to(t.device))]
