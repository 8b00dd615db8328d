"""The envs of `gym_hil`: gym-hil's base environment in wrappers, as an environment of the plugin `gymnasium`. One of
them lets people take over from the policy; a scripted person lifts gym-hil's cube.

A person is an object with the methods of gym-hil's controllers: start, stop, reset, update, get_deltas (three numbers
from -1 to 1), should_intervene, gripper_command ("open", "close" or "no-op") and get_episode_end_status ("success",
"failure", "rerecord_episode" or None). A person with an attribute `running` that has become false is gone.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np

from vla_rl.core.contexts import CheckContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.gym_hil.config import (
    ControllerSettings,
    DeviceSettings,
    GymHilConfig,
    PersonSettings,
    ScriptSettings,
    check_device_sharing,
)
from vla_rl.plugins.envs.gym_hil.interpreter import find_missing
from vla_rl.plugins.envs.gymnasium import single_env
from vla_rl.plugins.envs.gymnasium.config import STATES, CameraSettings, GymnasiumConfig, InterventionSettings, Wrapper
from vla_rl.plugins.envs.gymnasium.simulator import wrapper_layers
from vla_rl.toolkit.envs.meshes import cells_for, simplify_meshes, turn_effects_off
from vla_rl.toolkit.envs.single_env import env_factory
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs


def make_envs(config: GymHilConfig, context: EnvContext) -> SubprocEnvs:
    """Return the env instances. Raise UserError for what is missing, and for a device that several envs would share."""
    check_device_sharing(config, CheckContext(num_envs=context.num_envs))
    return single_env.make_envs(gymnasium_config(config), context, env_factory(HilEnv, config))


def try_out(config: GymHilConfig) -> None:
    """Execute one action in its own process. Raise UserError for what is wrong here, a takeover device included."""
    single_env.try_out(gymnasium_config(config))


def gymnasium_config(config: GymHilConfig) -> GymnasiumConfig:
    """Return the settings of the plugin `gymnasium` that make this environment. Raise UserError without gym-hil."""
    if missing := find_missing():
        raise UserError(f"gym_hil needs the package {missing}")
    person = config.person
    source: Any = "expert" if isinstance(person, ScriptSettings) else "person"
    wrappers = [
        Wrapper(
            name="gym_hil.wrappers.hil_wrappers:EEActionWrapper",
            kwargs={"ee_action_step_size": dict.fromkeys("xyz", STEP), "use_gripper": True},
        ),
        Wrapper(
            name=f"{__name__}:DrawCameras",
            kwargs={"cameras": list(config.cameras), "image_size": config.image_size, "fast": config.fast_render},
        ),
    ]
    if person is not None:
        wrappers.append(Wrapper(name=f"{TakeoverWrapper.__module__}:TakeoverWrapper", kwargs={"settings": person}))
        if isinstance(person, DeviceSettings):
            wrappers.append(Wrapper(name="gym_hil.wrappers.viewer_wrapper:PassiveViewerWrapper"))
    return GymnasiumConfig(
        id="gym_hil/PandaPickCubeBase-v0",
        kwargs={"random_block_position": config.random_block, "reward_type": config.reward},
        imports=("gym_hil",),
        instruction=config.instruction,
        cameras={name: CameraSettings(source=f"render.{name}", size=config.image_size) for name in config.cameras},
        state="agent_pos",
        success="succeed",
        interventions=None if person is None else InterventionSettings(source=source),
        wrappers=tuple(wrappers),
        max_steps=config.max_steps,
        train_states=config.train_states,
        eval_states=config.eval_states,
        control_hz=config.control_hz,
        deterministic=person is None or isinstance(person, ScriptSettings),
        processes=config.processes,
    )


class HilEnv(single_env.GymnasiumEnv):
    """One environment, whose person may be asked not to intervene in evaluations."""

    def __init__(self, config: GymHilConfig) -> None:
        super().__init__(gymnasium_config(config))
        self._person = config.person

    def reset(self, state_id: int, seed: int) -> None:
        super().reset(state_id, seed)
        if self._person is not None and self._env is not None:
            wrapper = next(layer for layer in wrapper_layers(self._env) if isinstance(layer, TakeoverWrapper))
            wrapper.listens = self._person.in_evaluation or state_id >= STATES


class DrawCameras(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Renders the chosen cameras where `render` is called. gym-hil renders all of them at every step, or none."""

    def __init__(self, env: gymnasium.Env[Any, Any], cameras: list[str], image_size: int, fast: bool) -> None:
        super().__init__(env)
        self._cameras = cameras
        self._size = image_size
        self._fast = fast
        self._renderer: Any = None

    def render(self) -> Any:
        """Return the images by camera, uint8 [H, W, 3]."""
        env: Any = self.env.unwrapped
        if self._renderer is None:
            self._renderer = self._new_renderer(env.model)
        images: dict[str, Array] = {}
        for name in self._cameras:
            self._renderer.update_scene(env.data, camera={"front": "front", "wrist": "handcam_rgb"}[name])
            images[name] = np.array(self._renderer.render())
        return images

    def _new_renderer(self, model: Any) -> Any:
        import mujoco

        view = model.vis.global_
        view.offwidth = max(view.offwidth, self._size)
        view.offheight = max(view.offheight, self._size)
        if not self._fast:
            return mujoco.Renderer(model, self._size, self._size)
        turn_effects_off(model)
        with simplify_meshes(model, cells_for(self._size)):
            return mujoco.Renderer(model, self._size, self._size)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self.env.close()


STEP = 0.025
"""Metres that an action of 1 moves the hand."""
CLOSE = "open"
"""Command that closes the gripper: gym-hil adds 1 for "open", and this gripper is closed at 255."""
OPEN = "close"
GRIPPER = {"open": 2.0, "close": 0.0, "no-op": 1.0}


class TakeoverWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Lets a person act instead of the policy, and reports it in the info: `is_intervention`, `teleop_action`. A person
    may also end the episode: by success (`succeed`, reward 1), by failure, or, to record it again, by truncation."""

    def __init__(self, env: gymnasium.Env[Any, Any], settings: PersonSettings) -> None:
        super().__init__(env)
        self.listens = True
        """Whether the person may act in this episode."""
        self.name = settings.controller if isinstance(settings, ControllerSettings) else settings.type
        self.person = _create_person(settings, env.unwrapped)
        self._call_person("start")

    def reset(self, **kwargs: Any) -> Any:
        result = self.env.reset(**kwargs)
        self._call_person("reset")
        return result

    def step(self, action: Array) -> Any:
        self._call_person("update")
        takes_over = self.listens and bool(self._call_person("should_intervene"))
        if takes_over:
            numbers = [*self._call_person("get_deltas"), GRIPPER[self._call_person("gripper_command")]]
            space = self.action_space
            assert isinstance(space, gymnasium.spaces.Box)
            action = np.clip(np.asarray(numbers, np.float32), space.low, space.high)
        status = self._call_person("get_episode_end_status")
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self.listens and status == "success":
            info["succeed"] = True
            reward = 1.0
            terminated = True
        elif self.listens and status == "failure":
            terminated = True
        elif self.listens and status is not None:
            truncated = True
        info["is_intervention"] = takes_over
        info["teleop_action"] = action
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        self._call_person("stop")
        self.env.close()

    def _call_person(self, method: str) -> Any:
        """Call a method of the person. Raise UserError for a device that does not work, or has disappeared."""
        try:
            answer = getattr(self.person, method)()
        except UserError:
            raise
        except Exception as exc:
            raise UserError(
                f"person: the takeover device {self.name!r} does not work ({method}: {type(exc).__name__}: {exc})"
            ) from exc
        if method != "stop" and (not getattr(self.person, "running", True) or _is_unplugged(self.person)):
            raise UserError(
                f"person: the takeover device {self.name!r} is not there any more (or was not there at the start): "
                "no one could stop the robot, so the run ends; connect it, and resume the run"
            )
        return answer


def _create_person(settings: PersonSettings, env: Any) -> Any:
    """Return the person of these settings. Raise UserError for one that cannot be made."""
    if isinstance(settings, ScriptSettings):
        return ScriptedPerson(env, after=settings.after, steps=settings.steps)
    name = settings.controller if isinstance(settings, ControllerSettings) else settings.type
    try:
        if isinstance(settings, DeviceSettings):
            controllers = importlib.import_module("gym_hil.wrappers.intervention_utils")
            kind = {"keyboard": controllers.KeyboardController, "gamepad": controllers.GamepadController}[name]
            return kind(x_step_size=1.0, y_step_size=1.0, z_step_size=1.0)
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)(env, **settings.kwargs)
    except (ImportError, AttributeError, TypeError) as exc:
        raise UserError(f"person.controller: {name!r} cannot be made: {type(exc).__name__}: {exc}") from exc


def _is_unplugged(person: Any) -> bool:
    """Return whether a gamepad of gym-hil has lost its joystick."""
    joystick = getattr(person, "joystick", None)
    if joystick is None:
        return False
    import pygame

    return bool(pygame.joystick.get_count() == 0)


class ScriptedPerson:
    """Watches the policy, and lifts the cube where it makes no progress: hand above it, down, close, up. Progress is a
    new best of the distance between hand and cube, less ten times the cube's height, by more than 1 cm."""

    def __init__(self, env: Any, *, after: int, steps: int | None) -> None:
        self.env = env
        self.after = after
        self.steps = steps
        self._floor: float | None = None
        """Height of the cube at rest in metres; None before the first look."""
        self.reset()

    def start(self) -> None:
        """Do nothing: there is no device."""

    stop = start

    def reset(self) -> None:
        self._best = np.inf
        self._idle = -1
        """Actions without progress; the first look is before the first action."""
        self._acted = 0
        self._acts = False
        self._restart_motion()

    def update(self) -> None:
        """Look at the scene, and decide whether to act at the next step and how."""
        hand, cube = self._read_positions()
        floor = float(cube[2]) if self._floor is None else self._floor
        self._floor = floor
        distance = float(np.linalg.norm(hand - cube)) - 10 * max(float(cube[2]) - floor, 0.0)
        progress = distance < self._best - 0.01
        self._best = min(self._best, distance) if progress else self._best
        self._idle = 0 if progress else self._idle + 1
        if self._acts and self._acted == self.steps:
            self._acts = False
            self._idle = 0
        elif not self._acts and self._idle >= self.after:
            self._acts = True
            self._acted = 0
            self._restart_motion()
        if self._acts:
            self._acted += 1
            self._plan_action(hand, cube)

    def should_intervene(self) -> bool:
        return self._acts

    def get_deltas(self) -> Array:
        return self._deltas

    def gripper_command(self) -> str:
        return self._gripper

    def get_episode_end_status(self) -> None:
        """Return None: the simulator judges success."""

    def _read_positions(self) -> tuple[Array, Array]:
        """Return the positions of hand and cube in metres, [3] each."""
        sensors = self.env.data.sensor
        return sensors("2f85/pinch_pos").data.copy(), sensors("block_pos").data.copy()

    def _restart_motion(self) -> None:
        self._stage = "above"
        self._closing = 0
        self._deltas = np.zeros(3)
        self._gripper = "no-op"

    def _plan_action(self, hand: Array, cube: Array) -> None:
        """Set the next action."""
        above = cube + [0, 0, 0.06]
        if self._stage == "above" and np.linalg.norm((above - hand)[:2]) < 0.01:
            self._stage = "down"
        if self._stage == "down" and np.linalg.norm(cube - hand) < 0.012:
            self._stage = "close"
        if self._stage == "close":
            self._closing += 1
            if self._closing > 3:
                self._stage = "up"
        target = {"above": above, "down": cube, "close": cube, "up": hand + [0, 0, 2 * STEP]}[self._stage]
        self._deltas = np.clip((target - hand) / STEP, -1.0, 1.0)
        self._gripper = OPEN if self._stage in ("above", "down") else CLOSE
