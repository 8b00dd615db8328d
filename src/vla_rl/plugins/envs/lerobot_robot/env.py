"""The env of `lerobot_robot`: resets with a person, bounded actions in real time, takeovers and lost connections; and
the targets of a robot's joints: their bounds, the largest step, and what an action means."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import sleep
from typing import Any

import numpy as np

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import SafetyStop, UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.types import (
    ActionSource,
    Array,
    ChunkResult,
    EnvInfo,
    Observation,
    ResetState,
    TaskInfo,
    to_numpy,
)
from vla_rl.plugins.envs.lerobot_robot.config import LeRobotRobotConfig
from vla_rl.plugins.envs.lerobot_robot.device_process import DeviceProcess, RobotLost
from vla_rl.toolkit.envs.real_time import RealTime
from vla_rl.toolkit.envs.single_env import Outcome, empty_records, execute_chunk, make_result
from vla_rl.toolkit.images import resized
from vla_rl.toolkit.people.panel import Panel
from vla_rl.toolkit.people.questions import ask_person, check_stop, open_panel
from vla_rl.toolkit.trainers.dummy_samples import dummy_observation

TRAIN_STATES = 1000
"""Number of train states of each task. They mean nothing to a robot, but episodes are counted by them."""
CONNECT_TRIES = 3
RETRY_S = 2.0
"""Seconds between attempts to connect a robot again."""
MAY_MOVE = "the robot will move to its start pose: ready?"
SCENE = "reset the scene for {task!r}: ready?"
RUNNING = "the robot acts on {task!r}; stop ends the run before the next action"


def make_env(config: LeRobotRobotConfig, context: EnvContext) -> RobotEnv:
    """Open the devices. Raise UserError for several envs, and for settings that do not fit the robot."""
    if context.num_envs > 1:
        raise UserError(f"lerobot_robot drives one robot, and this worker has {context.num_envs}; give env.num_envs: 1")
    return RobotEnv(config)


class RobotEnv(SimEnv):
    """One robot. Where it stands at the start of an episode is up to the person who resets the scene."""

    num_envs = 1

    def __init__(self, config: LeRobotRobotConfig) -> None:
        """Create the devices, without connecting them. Raises UserError for settings that do not fit the robot."""
        self._config = config
        self._devices: DeviceProcess | None = DeviceProcess(config)
        try:
            description = self._devices.description
            if config.teleoperator is not None and config.takeover == "events" and not description["events"]:
                raise UserError(
                    f"env.takeover: device {config.teleoperator['type']!r} does not say when a person takes over; use "
                    "one that does (gamepad, keyboard_ee, or your own class with get_teleop_events), or takeover: "
                    "always, to record demonstrations"
                )
            self._limits = TargetLimits(config, description["action"])
            self._cameras = _select_cameras(config, description["observation"])
            self._state = _select_state(config, description["observation"])
            self.info = _env_info(config, self._limits, self._cameras, self._state)
            self._panel: Panel | None = None
            if config.reset is not None:
                self._panel = open_panel(config.reset, "env.reset")
                self.waits_s = config.reset.deadline_s * (2 if config.start_pose else 1)
        except BaseException:
            self._devices.close()
            raise
        self._tasks = {state.id: state.task for split in ("train", "eval") for state in self.reset_states(split)}
        self._real_time = RealTime(config.control_hz)
        self._instruction = ""
        self._numbers: Mapping[str, Any] = {}
        """The robot's last observation: name -> number or image."""
        self._obs: Observation | None = None
        self._target: Array | None = None
        """Last target that the robot took, float32 [A]; None: it is not connected, or unknown."""
        self._end: Outcome | None = None
        """Result of the action that ended the running episode."""
        self._faults: list[str] = []
        self._moved_to_start = False
        """The robot was at its start pose before, so a person knows that it moves there."""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        count = TRAIN_STATES if split == "train" else self._config.eval_episodes
        first = len(self.info.tasks) * self._config.eval_episodes if split == "train" else 0
        return tuple(
            ResetState(id=first + i * count + k, task=task.name)
            for i, task in enumerate(self.info.tasks)
            for k in range(count)
        )

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        """Connect the robot unless it is, move it to its start pose, and ask a person for the scene. Raises SafetyStop,
        also where the robot cannot be connected, and StopRequested."""
        instruction = self.info.task(self._tasks[int(to_numpy(state_ids)[0])]).instruction
        for attempt in range(CONNECT_TRIES):
            try:
                return self._begin_episode(instruction)
            except RobotLost as exc:
                self._drop_robot(exc)
                if attempt + 1 == CONNECT_TRIES:
                    raise SafetyStop(
                        f"env.robot: {exc}; tried {CONNECT_TRIES} times, so the run ends; connect it and resume"
                    ) from exc
                sleep(RETRY_S)
        raise AssertionError

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        """Execute a chunk in real time. A lost connection is a fault: the robot holds, as far as it can be commanded,
        and the episode is repeated. Raises SafetyStop."""
        actions = np.asarray(to_numpy(actions), np.float32)
        records = empty_records(self.info, *actions.shape[:2])
        if to_numpy(active)[0] and self._target is not None:
            try:
                execute_chunk(records[0], actions[0], self._execute_action, stop_at_end)
                self._obs = self._observe_robot()
            except RobotLost as exc:
                self._drop_robot(exc)
                records = empty_records(self.info, *actions.shape[:2])
        return make_result(dummy_observation(self.info) if self._obs is None else self._obs, records)

    def faults(self) -> Mapping[int, Sequence[str]]:
        faults = self._faults
        self._faults = []
        return {0: faults} if faults else {}

    def close(self) -> None:
        """Let the robot hold its position, and disconnect it."""
        if self._devices is not None:
            self._devices.close()
            self._devices = None
        if self._panel is not None:
            self._panel.close()
            self._panel = None

    # ------------------------------------------------------------------------------------------------------ inside

    def _begin_episode(self, instruction: str) -> Observation:
        """Begin an episode. Raises RobotLost and what `reset` raises."""
        if self._devices is None:
            self._devices = DeviceProcess(self._config)
        self._devices.connect()
        if self._config.start_pose is not None:
            if not self._moved_to_start:
                self._ask_person(MAY_MOVE)
            self._move_to_start(self._config.start_pose)
        self._ask_person(SCENE.format(task=instruction))
        if self._panel is not None:
            self._panel.show_text(RUNNING.format(task=instruction), ())
        self._instruction = instruction
        self._end = None
        self._obs = self._observe_robot()
        self._target = self._limits.read_present_target(self._numbers)
        self._real_time.restart()
        return self._obs

    def _execute_action(self, action: Array) -> Outcome:
        """Execute one action, the person's where a person takes over. Raises RobotLost and SafetyStop."""
        if self._end is not None:
            return self._end._replace(reward=0.0, source=ActionSource.POLICY, executed_action=None, late=False)
        assert self._devices is not None
        assert self._target is not None
        late = self._real_time.wait()
        self._check_stop()
        events: Mapping[str, bool] = {}
        personal = None
        if self._config.teleoperator is not None:
            try:
                events, personal = self._devices.teleoperate(self._config.takeover == "always")
            except SafetyStop:
                self._hold_robot()
                raise
        before = self._target
        wanted = (
            self._limits.compute_target(action, before) if personal is None else self._limits.order_targets(personal)
        )
        self._target = self._limits.read_taken_target(self._devices.send(self._limits.by_name(wanted, before)))
        outcome = Outcome(0.0, False, False, late=late)
        if personal is not None:
            executed = self._limits.compute_action(self._target, before)
            outcome = outcome._replace(source=ActionSource.PERSON, executed_action=executed)
        if events.get("rerecord_episode"):
            outcome = outcome._replace(truncated=True)
        elif events.get("success"):
            outcome = outcome._replace(reward=1.0, success=True, terminated=True)
        elif events.get("terminate_episode") or events.get("failure"):
            outcome = outcome._replace(terminated=True)
        if outcome.terminated or outcome.truncated:
            self._end = outcome
        return outcome

    def _move_to_start(self, pose: Mapping[str, float]) -> None:
        """Move to the start pose at `max_step`. Raises RobotLost and SafetyStop."""
        assert self._devices is not None
        goal = self._limits.order_targets(pose)
        present = self._limits.read_present_target(self._devices.observe())
        real_time = RealTime(self._config.control_hz)
        for _ in range(self._limits.count_steps(present, goal)):
            real_time.wait()
            self._check_stop()
            present = self._limits.read_taken_target(self._devices.send(self._limits.by_name(goal, present)))
        self._moved_to_start = True

    def _observe_robot(self) -> Observation:
        """Read the robot. Raises RobotLost, and UserError for other names or images than it announced."""
        assert self._devices is not None
        self._numbers = self._devices.observe()
        missing = [name for name in (*self._cameras, *self._state) if name not in self._numbers]
        if missing:
            raise UserError(
                f"env.robot: the robot {self._config.robot['type']!r} announces {', '.join(missing)} in its "
                f"observation_features, and its get_observation gives {', '.join(self._numbers) or 'nothing'}; correct "
                "the robot's class"
            )
        images = {}
        for name, shape in self._cameras.items():
            image = self._numbers[name]
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
                raise UserError(f"env.cameras: {name} gave {image.dtype} {list(image.shape)}, no image in colours")
            images[name] = resized(image, shape)[None]
        state = np.array([[self._numbers[name] for name in self._state]], np.float32) if self._state else None
        if state is not None and not np.isfinite(state).all():
            raise RobotLost(f"the robot's observation is not finite: {dict(zip(self._state, state[0], strict=True))}")
        if self._panel is not None and images:
            self._panel.show_image(next(iter(images.values()))[0])
        return Observation(images=images, instructions=(self._instruction,), state=state)

    def _drop_robot(self, error: RobotLost) -> None:
        """Note a fault, and let go of the robot: its process tells it to hold, as far as that is possible."""
        self._faults.append(str(error))
        self._target = None
        self._moved_to_start = False
        if self._devices is not None:
            self._devices.close()
            self._devices = None

    def _ask_person(self, question: str) -> None:
        """Wait for a person. Raises SafetyStop, NobodyAnswered and StopRequested."""
        if self.stop_requested():
            raise StopRequested
        if self._panel is not None and self._config.reset is not None:
            ask_person(
                self._panel,
                question,
                ("ready",),
                deadline_s=self._config.reset.deadline_s,
                stop_requested=self.stop_requested,
                path="env.reset",
            )

    def _check_stop(self) -> None:
        """Let the robot hold, and raise SafetyStop, if a person pressed stop."""
        if self._panel is None:
            return
        try:
            check_stop(self._panel, self._panel.take_answer(0.0))
        except SafetyStop:
            self._hold_robot()
            raise

    def _hold_robot(self) -> None:
        """Let the robot stay where it is, if commands still reach it."""
        if self._devices is not None:
            with suppress(RobotLost):
                self._devices.hold()


def _select_cameras(config: LeRobotRobotConfig, features: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return camera -> (height, width) of its images. Raises UserError for cameras that the robot does not have."""
    shapes = {name: kind for name, kind in features.items() if isinstance(kind, tuple) and kind[-1:] == (3,)}
    unknown = set(config.cameras or ()) - shapes.keys()
    if unknown or not shapes:
        raise UserError(
            f"env.cameras: the robot has {', '.join(shapes) or 'no camera'}"
            + (f", and no {', '.join(sorted(unknown))}" if unknown else "; give it one in env.robot.cameras")
        )
    size = config.image_size
    shape = (size, size) if isinstance(size, int) else size
    return {name: shape or (int(shapes[name][0]), int(shapes[name][1])) for name in config.cameras or shapes}


def _select_state(config: LeRobotRobotConfig, features: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the state's numbers. Raises UserError for those that the robot does not report."""
    numbers = [name for name, kind in features.items() if kind is float]
    unknown = set(config.state or ()) - set(numbers)
    if unknown:
        raise UserError(f"env.state: the robot reports {', '.join(numbers)}, and no {', '.join(sorted(unknown))}")
    return tuple(numbers) if config.state is None else config.state


def _env_info(
    config: LeRobotRobotConfig, limits: TargetLimits, cameras: Mapping[str, tuple[int, int]], state: tuple[str, ...]
) -> EnvInfo:
    max_steps = max(1, round(config.episode_seconds * config.control_hz))
    tasks = [
        TaskInfo(name=re.sub(r"\W+", "_", text.lower()).strip("_"), instruction=text, max_steps=max_steps)
        for text in config.tasks
    ]
    if len({task.name for task in tasks}) < len(tasks):
        raise UserError("env.tasks: two instructions differ only in signs or capital letters; reword one")
    low, high = limits.action_range
    note = (
        f"a real robot ({config.robot['type']}): a person arranges the initial states, so they are not fixed scenes, "
        "seeds have no effect, and no episode can be repeated"
    )
    return EnvInfo(
        cameras=cameras,
        state_dim=len(state),
        action_low=tuple(low.tolist()),
        action_high=tuple(high.tolist()),
        tasks=tuple(tasks),
        notes=(note,),
        deterministic=False,
        fixed_states=False,
        takeovers=config.teleoperator is not None,
        control_hz=config.control_hz,
        action_names=limits.names,
        state_names=state,
    )


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
        """Return the robot's position as a target; 0, within the bounds, for what it does not report (velocities)."""
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
