"""Parts of networks that model plugins of several families share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def sine_cosine_positions(patches: int, dim: int) -> Tensor:
    """[patches, dim] of a square grid: a quarter of the channels each for sin and cos of x and y."""
    side, quarter = math.isqrt(patches), dim // 4
    frequency = math.pi / 2 ** torch.arange(quarter, dtype=torch.float32).mul(5 / max(quarter - 1, 1))
    angle = torch.arange(side, dtype=torch.float32)[:, None] * frequency
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)
    grid = torch.cat([axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)], dim=2)
    return nn.functional.pad(grid.reshape(patches, -1), (0, dim - 4 * quarter))


Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def misfits(own: Shapes, given: Shapes) -> str:
    """How the weights of a file differ from a network's: lines that list what is missing, unexpected or of another
    shape; empty where they fit."""
    wrong = [f"{n}: {given[n]} instead of {own[n]}" for n in own.keys() & given.keys() if own[n] != given[n]]
    problems: dict[str, Iterable[str]] = {
        "missing": own.keys() - given.keys(),
        "unexpected": given.keys() - own.keys(),
        "of another shape": wrong,
    }
    lines = [(what, sorted(names)) for what, names in problems.items()]
    return "\n".join(f"  {what} ({len(names)}): {_some(names)}" for what, names in lines if names)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
