"""Input checks: shapes that would broadcast, non-bool masks, unknown names, NaN. Settings use it without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from vla_rl.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["step-mean", "trajectory-mean", "rlinf"]
Deviation = Literal["unbiased", "population"]
Granularity = Literal["token", "action", "chunk"]


class ShapeError(UserError, ValueError):
    """Tensors that must have the same shape do not."""


class MaskError(UserError, TypeError):
    """A mask is not of type bool."""


class NotFiniteError(UserError, ValueError):
    """Rewards, values or scores contain NaN or infinity."""


def check_shapes(**tensors: Tensor | None) -> None:
    """Raise ShapeError unless all given tensors (None is skipped) have the same shape."""
    shapes = [(name, tuple(t.shape)) for name, t in tensors.items() if t is not None]
    if len({shape for _, shape in shapes}) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes)
        raise ShapeError(f"shapes differ, and are never broadcast: {listed}")


def check_time_major(**tensors: Tensor | None) -> None:
    """Raise ShapeError unless all given tensors are [S, N], with S steps of one granularity: chunks or actions."""
    check_shapes(**tensors)
    wrong = [f"{name} {list(t.shape)}" for name, t in tensors.items() if t is not None and t.dim() != 2]
    if wrong:
        raise ShapeError(
            f"expected [S, N], S chunk steps or S = T * C actions of N columns; got {', '.join(wrong)}; "
            f"core.samples.by_action turns [T, N, C] into [T * C, N]"
        )


def check_masks(**tensors: Tensor | None) -> None:
    """Raise MaskError unless all given tensors are bool."""
    # By its name: `torch.bool` would need torch, without which settings are read.
    wrong = [f"{name} {t.dtype}" for name, t in tensors.items() if t is not None and str(t.dtype) != "torch.bool"]
    if wrong:
        raise MaskError(f"masks are bool tensors, got {', '.join(wrong)}; use mask > 0")


def check_name(what: str, name: str, names: Sequence[str]) -> None:
    """Raise UserError unless `name` is one of `names`."""
    if name not in names:
        raise UserError(f"unknown {what} {name!r}; there are: {', '.join(names)}")


def check_finite(**tensors: Tensor) -> None:
    """Raise NotFiniteError, with the number of non-finite entries and the position of the first. Use it on the
    trajectory record only: on a device it would wait for the numbers."""
    for name, tensor in tensors.items():
        not_finite = ~tensor.isfinite()
        if bool(not_finite.any()):
            first = not_finite.nonzero()[0].tolist()
            raise NotFiniteError(
                f"{name} {list(tensor.shape)}: {int(not_finite.sum())} of {not_finite.numel()} are not finite, "
                f"the first at {first} ({float(tensor[tuple(first)])}); "
                f"look at what the simulator, the critic or the reward gave"
            )
