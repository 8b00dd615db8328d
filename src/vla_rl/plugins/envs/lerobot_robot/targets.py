"""Targets of a robot's joints: their bounds, the largest step, and what an action means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.lerobot_robot.config import LeRobotRobotConfig


class TargetLimits:
    """Bounds of one robot's targets. Arrays of targets and actions are float32 [A], in the order of `names`."""

    def __init__(self, config: LeRobotRobotConfig, names: Sequence[str]) -> None:
        """Match the settings with the robot's actions. Raises UserError for names that do not fit."""
        self.names = tuple(names)
        if not self.names:
            raise UserError("env.robot: the robot takes no numbers as actions")
        bounds = _by_name(config.action_bounds, self.names, "env.action_bounds")
        self.low = np.array([pair[0] for pair in bounds], np.float32)
        self.high = np.array([pair[1] for pair in bounds], np.float32)
        self.step = np.array(_by_name(config.max_step, self.names, "env.max_step"), np.float32)
        self._relative = config.control == "step"
        if config.start_pose is not None:
            _check_names(config.start_pose, self.names, "env.start_pose")
            for name, low, high in zip(self.names, self.low, self.high, strict=True):
                if not low <= config.start_pose[name] <= high:
                    raise UserError(f"env.start_pose: {name}: {config.start_pose[name]:g} is outside env.action_bounds")

    @property
    def action_range(self) -> tuple[Array, Array]:
        """Lowest and highest action."""
        return (-self.step, self.step) if self._relative else (self.low, self.high)

    def compute_target(self, action: Array, before: Array) -> Array:
        """Return the target that an action means, after the target `before`."""
        wanted: Array = before + action if self._relative else action
        return wanted

    def compute_action(self, target: Array, before: Array) -> Array:
        """Return the action that leads from `before` to `target`, within the range of actions."""
        low, high = self.action_range
        meant: Array = np.clip(target - before if self._relative else target, low, high)
        return meant.astype(np.float32)

    def limit_target(self, wanted: Array, before: Array) -> Array:
        """Return the target that may be sent: within the bounds, and no further from `before` than `step`. Where the
        robot stands outside the bounds, it approaches them by that step."""
        inside = np.clip(wanted, self.low, self.high)
        near: Array = np.clip(inside, before - self.step, before + self.step)
        return near.astype(np.float32)

    def by_name(self, wanted: Array, before: Array) -> dict[str, float]:
        """Return the target that may be sent, by name. Raises UserError for one that is not finite."""
        if not np.isfinite(wanted).all():
            raise UserError(f"the next target is not finite: {dict(zip(self.names, wanted.tolist(), strict=True))}")
        return dict(zip(self.names, self.limit_target(wanted, before).tolist(), strict=True))

    def order_targets(self, numbers: Mapping[str, float]) -> Array:
        """Return targets within the bounds. Raises UserError for names that are not the robot's."""
        missing = [name for name in self.names if name not in numbers]
        if missing:
            raise UserError(
                f"env.teleoperator: the device's action has {', '.join(numbers)}, and the robot needs "
                f"{', '.join(missing)}; use a device for this robot, such as the leader arm of a follower"
            )
        wanted: Array = np.clip(np.array([numbers[name] for name in self.names], np.float32), self.low, self.high)
        return wanted

    def read_taken_target(self, sent: Mapping[str, float]) -> Array:
        """Return the target that the robot took. Raises UserError for an answer without the robot's names."""
        missing = [name for name in self.names if name not in sent]
        if missing:
            raise UserError(
                f"env.robot: the robot announces {', '.join(missing)} in its action_features, and its send_action "
                f"answers {', '.join(sent) or 'nothing'}, so it is not known what it took; correct the robot's class"
            )
        return np.array([sent[name] for name in self.names], np.float32)

    def read_present_target(self, observation: Mapping[str, float]) -> Array:
        """Return the robot's present position as a target; 0, within the bounds, for what it does not report, such as
        velocities."""
        rest = np.clip(np.zeros_like(self.low), self.low, self.high)
        return np.array([observation.get(name, zero) for name, zero in zip(self.names, rest, strict=True)], np.float32)

    def count_steps(self, before: Array, goal: Array) -> int:
        """Return the number of steps from `before` to `goal`."""
        return math.ceil(float((np.abs(goal - before) / self.step).max()) - 1e-4)


def _by_name(setting: Any, names: Sequence[str], path: str) -> list[Any]:
    """Return the setting of each name, from a mapping or from one value for all."""
    if not isinstance(setting, Mapping):
        return [setting] * len(names)
    _check_names(setting, names, path)
    return [setting[name] for name in names]


def _check_names(setting: Mapping[str, object], names: Sequence[str], path: str) -> None:
    if set(setting) != set(names):
        missing = [name for name in names if name not in setting]
        unknown = [name for name in setting if name not in names]
        text = "; ".join(
            f"{what} {', '.join(several)}"
            for what, several in (("missing:", missing), ("unknown:", unknown))
            if several
        )
        raise UserError(f"{path}: the robot's actions are {', '.join(names)}; {text}")
