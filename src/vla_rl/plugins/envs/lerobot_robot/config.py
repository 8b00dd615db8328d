"""Settings of `lerobot_robot`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.toolkit.envs.settings import LARGEST, SMALLEST
from vla_rl.toolkit.people.settings import PanelSettings


def _check_device(instance: Any, attribute: Any, settings: Mapping[str, Any] | None) -> None:
    if settings is not None and not isinstance(settings.get("type"), str):
        raise ValueError(f"has no type; name lerobot's class, such as {attribute.name}: {{type: so101_follower}}")


def _check_tasks(instance: Any, attribute: Any, tasks: tuple[str, ...]) -> None:
    if not tasks or not all(text.strip() for text in tasks):
        raise ValueError("give an instruction for each task, such as [pick up the red cube]")
    if len(set(tasks)) < len(tasks):
        raise ValueError("an instruction stands there twice")


def _check_pair(pair: tuple[float, float], where: str = "") -> None:
    if not pair[0] < pair[1]:
        raise ValueError(f"{where}{list(pair)} is not a range; give [lowest, highest]")


def _check_bounds(instance: Any, attribute: Any, bounds: Any) -> None:
    if isinstance(bounds, Mapping):
        for name, pair in bounds.items():
            _check_pair(pair, f"{name}: ")
    else:
        _check_pair(bounds)


def _check_positive(instance: Any, attribute: Any, step: Any) -> None:
    if not all(number > 0 for number in (step.values() if isinstance(step, Mapping) else (step,))):
        raise ValueError("give numbers above 0: the largest change of a target by one action")


def _check_size(instance: Any, attribute: Any, size: int | tuple[int, int] | None) -> None:
    for side in () if size is None else size if isinstance(size, tuple) else (size,):
        if not SMALLEST <= side <= LARGEST:
            raise ValueError(f"{side} pixels; give {SMALLEST} to {LARGEST} (224 for most checkpoints)")


def _with_teleoperator(instance: Any, attribute: Any, takeover: str) -> None:
    if instance.teleoperator is None and takeover != attribute.default:
        raise ValueError("has no effect without a teleoperator")


@frozen(kw_only=True)
class LeRobotRobotConfig:
    """Spec keys of `lerobot_robot`."""

    robot: dict[str, Any] = field(validator=_check_device)
    """lerobot's settings of the robot, as in `lerobot-record --robot.KEY`: its type, port, id, cameras, ..."""
    teleoperator: dict[str, Any] | None = field(default=None, validator=_check_device)
    """lerobot's settings of the device for takeovers, as in `--teleop.KEY`; null: no takeovers."""
    takeover: Literal["events", "always"] = field(default="events", validator=_with_teleoperator)
    """When the person acts. `events`: while the device says so (`get_teleop_events`); `always`: in every step, to
    record demonstrations."""
    imports: tuple[str, ...] = ()
    """Modules to import first, which register further robots, cameras or devices with lerobot. Installed distributions
    `lerobot_robot_*`, `lerobot-robot-*` and the like are imported anyway."""
    tasks: tuple[str, ...] = field(validator=_check_tasks)
    """Instruction of each task."""
    action_bounds: tuple[float, float] | dict[str, tuple[float, float]] = field(validator=_check_bounds)
    """Lowest and highest target, in the robot's units: one pair for all of its actions, or name -> pair. No target
    outside is ever sent."""
    max_step: float | dict[str, float] = field(validator=_check_positive)
    """Largest change of a target by one action, in the robot's units: a number, or name -> number. It bounds the speed:
    this times `control_hz` a second."""
    control: Literal["target", "step"] = "target"
    """Meaning of an action. `target`: the target of each joint; `step`: the change of the target, up to `max_step`."""
    control_hz: float = field(default=30.0, validator=[v.gt(0), v.le(1000)])
    """Actions a second, above 0 and at most 1000. Late actions are counted."""
    episode_seconds: float = field(default=20.0, validator=[v.gt(0), v.le(3600)])
    """Time limit of an episode in seconds, above 0 and at most 3600."""
    reset: PanelSettings | None = field(factory=PanelSettings)
    """Before each episode, ask a person who resets the scene; null: do not ask, such as with `rewards: {type: person}`,
    which asks too."""
    start_pose: dict[str, float] | None = None
    """Targets to which the robot moves before each episode, at `max_step`: action name -> number; null: it stays."""
    cameras: tuple[str, ...] | None = None
    """Cameras of the robot that the policy sees, in this order; null: all of them."""
    image_size: int | tuple[int, int] | None = field(default=None, validator=_check_size)
    """Size to which images are scaled: the side of a square, or [height, width], 8 to 1024; null: the camera's."""
    state: tuple[str, ...] | None = None
    """Numbers of the robot's observation that make the state, in this order; null: all of them."""
    eval_episodes: int = field(default=10, validator=[v.ge(1), v.le(10_000)])
    """Episodes of an evaluation for each task, unless `eval.episodes` says fewer; 1 to 10,000."""
