"""The envs of `gym_hil`: gym-hil's base environment in wrappers, as an environment of the plugin `gymnasium`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from vla_rl.core.contexts import CheckContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.gym_hil.config import (
    DeviceSettings,
    GymHilConfig,
    ScriptSettings,
    check_device_sharing,
)
from vla_rl.plugins.envs.gym_hil.interpreter import find_missing
from vla_rl.plugins.envs.gym_hil.people import STEP, TakeoverWrapper
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
    """Execute one action in a separate process. Raise UserError for what is wrong on this machine, a takeover device
    included."""
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
