"""State of what a trainer owns in addition to the policy and its optimiser, for checkpoints."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from vla_rl.core.errors import UserError
from vla_rl.core.trainers import Trainer

POLICY = "policy"
"""Name under which a trainer lists the policy and its optimiser, which a checkpoint holds once."""


def owned_state(trainer: Trainer[Any]) -> dict[str, Any]:
    """Return the state of a trainer's own modules, targets and optimisers, and its further state; {} if empty."""
    parts = {name: part.state_dict() for name, part in owned_parts(trainer).items()}
    further = dict(trainer.state())
    return parts | ({"state": further} if further else {})


def load_owned_state(trainer: Trainer[Any], saved: Mapping[str, Any], source: str) -> None:
    """Restore what `owned_state` returned. Raises UserError naming the `source` for the state of another trainer."""
    parts = owned_parts(trainer)
    expected = parts.keys() | ({"state"} if dict(trainer.state()) else set())
    if saved.keys() != expected:
        raise UserError(
            f"{source} holds the state of another trainer: missing {sorted(expected - saved.keys())[:5]}, unexpected "
            f"{sorted(saved.keys() - expected)[:5]}"
        )
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    if "state" in saved:
        trainer.load(saved["state"])


def find_unreadable(value: Any, path: str = "") -> tuple[str, str] | None:
    """Return the keys and the class of the first part of a state that would not come back from a checkpoint, which is
    read with `weights_only`; None where all parts do. `path`: keys that lead to `value`."""
    if type(value) is dict:
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
        return next(filter(None, (find_unreadable(key, path) for key in value)), None) or _first_unreadable(parts)
    if type(value) in (list, tuple):
        return _first_unreadable([(f"{path}[{i}]", part) for i, part in enumerate(value)])
    if value is None or type(value) in (str, int, float, bool, torch.Tensor):
        return None
    try:
        save_and_load(value)
    except Exception:  # pickle raises whatever an object's own methods do
        return path, f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return None


def save_and_load(value: Any) -> Any:
    """Return what comes back of a value from a checkpoint."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _first_unreadable(parts: list[tuple[str, Any]]) -> tuple[str, str] | None:
    return next(filter(None, (find_unreadable(part, path) for path, part in parts)), None)


def owned_parts(trainer: Trainer[Any]) -> dict[str, Any]:
    """Return name -> module or optimiser that the trainer owns in addition to the policy's."""
    kinds = {"modules": trainer.modules(), "targets": trainer.targets(), "optimizers": trainer.optimizers()}
    return {
        f"{kind}/{name}": part
        for kind, parts in kinds.items()
        for name, part in parts.items()
        if kind == "targets" or name != POLICY
    }
