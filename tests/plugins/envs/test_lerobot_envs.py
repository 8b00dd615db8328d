"""lerobot's environments as ids of `gymnasium`: folders with an env.py, and, where lerobot and the package are installed
(docs/simulators/gymnasium.md), the SO-101 arm of lerobot-env-so101 by its name in lerobot."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.gymnasium import plugin
from vla_rl.plugins.envs.gymnasium.config import CameraSettings, GymnasiumConfig
from vla_rl.testing import check_env

ENV_FILE = '''
"""A point that walks on a line, as lerobot's environments observe: `pixels`, `agent_pos` and the text of the task."""

from dataclasses import dataclass

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv


@dataclass
class Shape:
    height: int = 20
    width: int = 30


class Line(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    task_description = "walk to the right"

    def __init__(self, cameras, goal=1.0):
        self.render_mode, self._cameras, self._goal, shape = "rgb_array", cameras, goal, Shape()
        image = spaces.Box(0, 255, (shape.height, shape.width, 3), np.uint8)
        pixels = {
            "none": {},
            "one": {"pixels": image},
            "several": {"pixels": spaces.Dict({"front": image, "wrist": image})},
        }
        self.observation_space = spaces.Dict(pixels[cameras] | {"agent_pos": spaces.Box(-9, 9, (1,), np.float64)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position = self.np_random.random(1) / 2
        return self._observe(), {}

    def step(self, action):
        self._position = np.clip(self._position + action, -5, 5)
        solved = bool(self._position[0] > self._goal)
        return self._observe(), float(solved), solved, False, {"is_success": solved}

    def render(self):
        return np.full((20, 30, 3), 77, np.uint8)

    def _observe(self):
        image = np.full((20, 30, 3), int(50 * abs(self._position[0])), np.uint8)
        pixels = {
            "none": {},
            "one": {"pixels": image},
            "several": {"pixels": {"front": image, "wrist": 255 - image}},
        }
        return pixels[self._cameras] | {"agent_pos": self._position}


def make_env(n_envs=1, use_async_envs=False, cameras="several", returns="environment"):
    def make():
        return Line(cameras)

    def make_far():
        return Line(cameras, goal=4.0)

    return {
        "environment": make,
        "vector": lambda: SyncVectorEnv([make] * n_envs),
        "suites": lambda: {"line": {0: SyncVectorEnv([make]), 7: SyncVectorEnv([make_far])}},
        "processes": lambda: AsyncVectorEnv([make] * n_envs, context="fork"),
        "nothing": lambda: None,
    }[returns]()
'''
SO101 = {
    "id": "lerobot/so101",
    "kwargs": {"image_obs": True, "random_block_position": True, "episode_length": 8},
    "instruction": "lift the cube",
    "success": "succeed",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "env.py").write_text(ENV_FILE)
    return tmp_path


def make_line(path: Path, num_envs: int = 1, **changes: Any) -> Any:
    kwargs = {"path": str(path)} | changes.pop("kwargs", {})
    settings: dict[str, Any] = {
        "id": "lerobot/EnvHub",
        "instruction": "walk to the right",
        "success": "is_success",
        "max_steps": 6,
    }
    return plugin.build(GymnasiumConfig(kwargs=kwargs, **(settings | changes)), EnvContext(num_envs=num_envs, chunk=3))


@pytest.mark.parametrize("returns", ["environment", "vector"])
def test_a_folder_with_an_env_py_keeps_to_the_contract(folder: Path, returns: str) -> None:
    """Two envs, each in a separate process, with the images and the state that lerobot reads."""
    env = make_line(folder, num_envs=2, kwargs={"returns": returns})
    assert env.info.cameras == {"front": (20, 30), "wrist": (20, 30)}
    assert (env.info.state_dim, env.info.action_low, env.info.tasks[0].max_steps) == (1, (-1.0,), 6)
    check_env(env, num_envs=2, chunk=3, seconds=10)


def walk_right(env: Any) -> Any:
    zero = np.zeros(1, np.int64)
    env.reset(zero, zero, zero)
    return env.chunk_step(np.ones((1, 3, 1), np.float32), np.array([True]), True)


def test_one_of_several_tasks_is_chosen(folder: Path) -> None:
    near = walk_right(make_line(folder / "env.py", kwargs={"returns": "suites", "task": "line/0"}))
    far = walk_right(make_line(folder / "env.py", kwargs={"returns": "suites", "task": "line/7"}))
    assert near.success[0] and not far.success[0]


def test_one_image_is_the_camera_image_and_given_cameras_are_kept(folder: Path) -> None:
    env = make_line(folder, kwargs={"cameras": "one"})
    seen = walk_right(env).obs
    assert list(seen.images) == ["image"] and seen.images["image"][0, 0, 0, 0] == int(50 * abs(seen.state[0, 0]))
    drawn = make_line(folder, cameras={"main": CameraSettings(size=(20, 30))})
    assert drawn.info.state_dim == 0 and (walk_right(drawn).obs.images["main"] == 77).all()
    wrist = make_line(folder, cameras={"wrist": CameraSettings(source="pixels.wrist")}, state="agent_pos")
    assert wrist.info.cameras == {"wrist": (224, 224)} and wrist.info.state_dim == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cameras": "none"}, r"lerobot/EnvHub observes no image, .*'pixels' is not an entry of Dict\('agent_pos'.*\n  give the setting .* image_obs: true"),
        ({"returns": "suites"}, "env.py makes 2 environments: line/0, line/7\n  choose one of them with kwargs.task"),
        ({"returns": "suites", "task": "line/1"}, "env.py makes 2 environments, none of them 'line/1': line/0, line/7"),
        ({"returns": "processes"}, "env.py makes AsyncVectorEnv; one gymnasium.Env or SyncVectorEnv is needed"),
        ({"returns": "nothing"}, "env.py makes NoneType"),
        ({"colour": "red"}, "cannot be made with these arguments: TypeError: .*unexpected keyword argument 'colour'"),
        ({"path": "/no/such/folder"}, "kwargs.path of lerobot/EnvHub: /no/such/folder is not a file; give a folder with an env.py"),
    ],
)  # fmt: skip
def test_what_a_folder_cannot_give_is_named(folder: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_line(folder, kwargs=kwargs)


def test_a_file_without_make_env_is_named(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("import no_such_simulator")
    with pytest.raises(UserError, match="lerobot/EnvHub cannot be made: No module named 'no_such_simulator'"):
        make_line(tmp_path)
    (tmp_path / "env.py").write_text("import math")
    with pytest.raises(UserError, match=r"env.py has no function make_env\(n_envs, use_async_envs\)"):
        make_line(tmp_path)


@pytest.mark.skipif(find_spec("lerobot") is not None, reason="lerobot is installed")
def test_a_name_of_lerobot_without_lerobot_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"lerobot/so101 needs lerobot 0\.6 or later, .*env\.python"):
        plugin.build(GymnasiumConfig(**SO101), EnvContext())


needs_so101 = pytest.mark.skipif(
    find_spec("lerobot") is None or find_spec("lerobot_env_so101") is None,
    reason="needs pip install lerobot==0.6.1 lerobot-env-so101==0.4.0 and Python 3.12",
)


@pytest.mark.sim
@pytest.mark.timeout(900)
@needs_so101
def test_an_installed_environment_is_found_by_its_name_in_lerobot() -> None:
    env = plugin.build(GymnasiumConfig(**SO101, fast_render=True), EnvContext(num_envs=1, chunk=4))
    assert env.info.cameras == {"front": (128, 128)} and env.info.state_dim == 14
    assert (env.info.action_low, env.info.action_high) == ((-1.0, -1.0, -1.0, 0.0), (1.0, 1.0, 1.0, 1.0))
    assert env.info.tasks[0].max_steps == 8
    check_env(env, num_envs=1, chunk=4, seconds=20)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kwargs": {}}, r"lerobot/so101 observes no image, .*environment_state.*\n  give the setting .* image_obs: true"),
        ({"kwargs": {"image_ob": True}}, "kwargs: lerobot/so101 has no image_ob; it has task, fps, .*image_obs, "),
        ({"kwargs": {"fps": "often"}}, "kwargs: lerobot/so101 cannot be made with {'fps': 'often'}: .*often"),
        ({"id": "lerobot/so10"}, "no gymnasium environment 'lerobot/so10'; did you mean 'lerobot/so101'"),
        ({"id": "lerobot/isaaclab_arena"}, "no gymnasium environment 'lerobot/isaaclab_arena'"),
    ],
)  # fmt: skip
@needs_so101
def test_what_lerobot_cannot_make_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plugin.build(GymnasiumConfig(**(SO101 | changes)), EnvContext())
