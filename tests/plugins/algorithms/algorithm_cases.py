"""What the tests of algorithms share: numbers of the original implementations, and rollouts made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reference_files import reference
from vla_rl.core.types import Rollout


def cases_of(file: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of what an original implementation made."""
    cases = json.loads(reference("algorithms", file).read_text())["cases"]
    return list(cases.items()) if isinstance(cases, dict) else [(case["id"], case) for case in cases]


def tensors(data: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are tensors as tensors, the others as they are."""
    return {
        name: tensor(value) if isinstance(value, dict) and "shape" in value else value for name, value in data.items()
    }


def tensor(value: Mapping[str, Any]) -> Tensor:
    return torch.tensor(value["data"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    """Equal shapes, and values up to the tolerance."""
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance)


def rollout_of(
    rewards: Tensor,
    ended: Tensor,
    *,
    truncated: Tensor | None = None,
    values: Tensor | None = None,
    next_values: Tensor | None = None,
    valid: Tensor | None = None,
    log_probs: Tensor | None = None,
    group_size: int = 1,
    success: Tensor | None = None,
) -> Rollout:
    """A rollout of rewards and ends [T, N, C]; where `truncated` an end is one by time. Every action is valid unless
    `valid` says otherwise; log-probs are 0 with one token an action."""
    columns = rewards.shape[1]
    truncated = torch.zeros_like(ended) if truncated is None else truncated
    return Rollout(
        step=1,
        rewards=rewards,
        terminated=ended & ~truncated,
        truncated=truncated,
        valid=torch.ones_like(ended) if valid is None else valid,
        log_probs=torch.zeros(*rewards.shape, 1) if log_probs is None else log_probs,
        values=values,
        next_values=next_values,
        groups=torch.arange(columns) // group_size,
        success=(rewards.sum((0, 2)) > 0) if success is None else success,
        versions=torch.zeros(rewards.shape[:2], dtype=torch.long),
        episodes=(),
    )
