"""One Meta-World task in one simulator: exact resets, steps, images, and look-ahead without side effects. Imports
MuJoCo, so `MUJOCO_GL` is set before. A scene is fixed by a vector that Meta-World draws at each reset and can be made
to repeat, which is how its own benchmarks fix their tasks; the switches for that have no public names."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.metaworld.config import ACTION_DIM, CAMERAS, STATE_DIM, MetaWorldConfig
from vla_rl.toolkit.envs.meshes import turn_effects_off
from vla_rl.toolkit.envs.rendering import mujoco_error

os.environ.setdefault("MUJOCO_GL", "egl")

try:
    import mujoco
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP
    from metaworld.types import Task
except ModuleNotFoundError:
    raise
except (
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
) as error:  # what PyOpenGL and MuJoCo raise without a library
    raise mujoco_error(error) from error

if os.environ["MUJOCO_GL"] in ("egl", "osmesa") and not mujoco.GLContext.__module__.endswith(os.environ["MUJOCO_GL"]):
    raise UserError(
        "mujoco was imported before MUJOCO_GL was set, and would end this process when it draws\n"
        "  set MUJOCO_GL=egl in the environment of the run"
    )

NEVER = 2**62


class MetaWorldScene:
    """Simulator of one task. Building it takes a fifth of a second, a reset 20 ms."""

    def __init__(self, task: str, config: MetaWorldConfig) -> None:
        self.task = task
        self._config = config
        self._env: Any = ALL_V3_ENVIRONMENTS[task]()
        self._env.max_path_length = NEVER  # core enforces step limits; the simulator raises after its own
        make_policy: Any = ENV_POLICY_MAP[task]
        self._policy = make_policy()
        self._renderers: dict[int, mujoco.Renderer] = {}
        self.observation: Array = np.zeros(39)
        model = self._env.model
        buffer = model.vis.global_
        buffer.offwidth, buffer.offheight = (
            max(n, *config.cameras.values()) for n in (buffer.offwidth, buffer.offheight)
        )
        model.camera("corner2").pos = config.corner2_position
        if config.fast_render:
            turn_effects_off(model)

    def place(self, seed: int) -> None:
        """Start an episode in the scene that is drawn with this seed, whatever happened before."""
        env = self._env
        env._set_task_called = True
        env._freeze_rand_vec, env.seeded_rand_vec = False, True
        env.seed(seed)
        env.reset()
        scene = {"rand_vec": env._last_rand_vec.copy(), "env_cls": type(env), "partially_observable": False}
        env.set_task(Task(env_name=self.task, data=pickle.dumps(scene)))
        observation, _ = env.reset()
        self.observation = observation
        for _ in range(self._config.settle_steps):
            self.step(np.zeros(ACTION_DIM))

    def step(self, action: Array) -> tuple[float, bool]:
        """Apply one action, float [4]. Return Meta-World's dense reward, and success."""
        observation, reward, _, _, info = self._env.step(action)
        self.observation = observation
        return float(reward), bool(info["success"])

    def state(self) -> Array:
        """Return proprioception, float32 [4]: position of the hand [m] and opening of the gripper, 0 to 1."""
        return self.observation[:STATE_DIM].astype(np.float32)

    def images(self) -> dict[str, Array]:
        """Return the images: camera -> uint8 [H, W, 3], upright."""
        images = {}
        for name, size in self._config.cameras.items():
            if size not in self._renderers:
                self._renderers[size] = mujoco.Renderer(self._env.model, size, size)
            renderer = self._renderers[size]
            renderer.update_scene(self._env.data, name)
            image = renderer.render()
            images[name] = np.ascontiguousarray(image[::-1, ::-1] if CAMERAS[name] else image)
        return images

    def demonstrate(self) -> Array:
        """Return the official scripted policy's action for the current state, float32 [4] in [-1, 1]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about values that are clipped here
            action = self._policy.get_action(self.observation)
        return np.asarray(np.clip(action, -1, 1), np.float32)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Undo all steps made inside the context, to the last bit."""
        env, observation = self._env, self.observation
        attributes = dict(vars(env))
        env.data = copy(env.data)
        try:
            yield
        finally:
            vars(env).clear()
            vars(env).update(attributes)
            self.observation = observation

    def close(self) -> None:
        """Free the GL contexts."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
        self._env.close()
