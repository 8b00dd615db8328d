"""The actions of a gymnasium environment as one vector: its bounds, and its parts where the space is a dict."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen
from gymnasium import spaces

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.gymnasium.config import GymnasiumConfig
from vla_rl.plugins.envs.gymnasium.entries import walk_leaves


@frozen(eq=False)
class ActionLayout:
    """How the policy's numbers become an action of the environment."""

    parts: tuple[tuple[tuple[Any, ...], Any], ...]
    """(keys that lead to it, Box) of each part in the order of the numbers; no keys for a space that is one Box."""
    low: tuple[float, ...]
    high: tuple[float, ...]

    def build_action(self, numbers: Array) -> Any:
        """Return the action that the environment takes for float [A], clipped to the bounds."""
        numbers = np.clip(numbers, self.low, self.high)
        action: dict[Any, Any] = {}
        start = 0
        for keys, box in self.parts:
            end = start + int(np.prod(box.shape))
            part = numbers[start:end].astype(box.dtype).reshape(box.shape)
            start = end
            if not keys:
                return part
            target = action
            for parent in keys[:-1]:
                target = target.setdefault(parent, {})
            target[keys[-1]] = part
        return action

    def flatten_action(self, action: Any) -> Array:
        """Return an action of the environment as the policy's numbers, float32 [A]: the inverse of `action`, not
        clipped. Raise UserError for one that does not fit the space.
        """
        parts = []
        for keys, box in self.parts:
            part = action
            try:
                for key in keys:
                    part = part[key]
                parts.append(np.asarray(part, np.float32).reshape(box.shape).reshape(-1))
            except (KeyError, IndexError, TypeError, ValueError) as exc:
                place = "" if not keys else f" at {'.'.join(map(str, keys))}"
                raise UserError(
                    f"an action of a takeover does not fit the action space{place}: {action!r:.200} is not {box} "
                    f"({type(exc).__name__}: {exc})"
                ) from None
        return np.concatenate(parts)


def action_layout(space: Any, config: GymnasiumConfig) -> ActionLayout:
    """Return the layout of an action space. Raise UserError for actions that are not vectors of continuous numbers, and
    for bounds that are missing or too wide.
    """
    parts = _list_parts(space, config)
    space_low = np.concatenate([box.low.reshape(-1) for _, box in parts]).astype(np.float64)
    space_high = np.concatenate([box.high.reshape(-1) for _, box in parts]).astype(np.float64)
    if config.action_low is None or config.action_high is None:
        if not (np.isfinite(space_low).all() and np.isfinite(space_high).all()):
            raise UserError(
                f"{config.id} takes actions without bounds, {space}; say within which ones to act: action_low and "
                f"action_high, {len(space_low)} numbers each"
            )
        return ActionLayout(parts, tuple(space_low.tolist()), tuple(space_high.tolist()))
    low, high = config.action_low, config.action_high
    if len(low) != len(space_low):
        raise UserError(f"action_low has {len(low)} numbers, and {config.id} takes actions of {len(space_low)}")
    if (np.array(low) < space_low - 1e-6).any() or (np.array(high) > space_high + 1e-6).any():
        raise UserError(
            f"action_low {list(low)} and action_high {list(high)} reach beyond what {config.id} takes: {space}"
        )
    return ActionLayout(parts, low, high)


def _list_parts(space: Any, config: GymnasiumConfig) -> tuple[tuple[tuple[Any, ...], Any], ...]:
    if not isinstance(space, spaces.Dict):
        if config.actions:
            raise UserError(f"actions: {config.id} takes actions of {space}, not of a Dict; leave `actions` out")
        if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
            raise UserError(
                f"{config.id} takes actions of {space}, and a model here gives vectors of continuous numbers: the "
                "action space must be a Box of floats with one dimension, or a Dict of Boxes\n"
                "  choose another environment (MountainCarContinuous-v0 instead of CartPole-v1), or add a wrapper that "
                "converts"
            )
        return (((), space),)
    boxes = {".".join(map(str, keys)): (keys, box) for keys, box in walk_leaves(space)}
    if set(config.actions) != set(boxes):
        raise UserError(
            f"{config.id} takes a dict of actions; give all of its entries in the order of the policy's numbers: "
            f"actions: [{', '.join(boxes)}]" + _describe_difference(config.actions, list(boxes))
        )
    for path, (_, box) in boxes.items():
        if not isinstance(box, spaces.Box) or box.dtype.kind != "f":
            raise UserError(
                f"actions: {path!r} of {config.id} is {box}, not a Box of floats; add a wrapper that converts it"
            )
    return tuple(boxes[path] for path in config.actions)


def _describe_difference(given: tuple[str, ...], paths: list[str]) -> str:
    missing = [path for path in paths if path not in given]
    unknown = [path for path in given if path not in paths]
    lists = {"missing": missing, "unknown": unknown} if given else {}
    return "".join(f"; {title}: {', '.join(names)}" for title, names in lists.items() if names)
