"""Real gymnasium environments (classic control and Meta-World), and one written here that has what those lack."""

from __future__ import annotations

import json
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from vla_rl.core.catalogue import build, load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import ActionSource, Array
from vla_rl.plugins.envs.gymnasium import plugin, single_env
from vla_rl.plugins.envs.gymnasium.config import CameraSettings, GymnasiumConfig, InterventionSettings, Wrapper
from vla_rl.runtime.start import run
from vla_rl.testing import CheckFailed, check_env
from vla_rl.toolkit.envs.settings import Processes

ONE_ENV, ON = np.array([0]), np.array([True])
LIMIT = 6
drawn = pytest.mark.skipif(find_spec("pygame") is None, reason="needs pip install 'gymnasium[classic-control]'")
SPEC = """
name: gymnasium-test
plugins: [vla_rl.testing.scripted]
model: {type: linear}
env: {type: gymnasium, num_envs: 2, ENV}
rollout: {chunk: 4, episodes: 4, group_size: 2}
algorithm: {type: grpo}
runtime: {backend: local}
train: {steps: 1, lr: 1.0e-2, micro_batch: 4}
eval: {episodes_per_task: 1, before: false}
hooks: [{type: jsonl}]
"""
CAR = "id: MountainCarContinuous-v0, instruction: drive up the hill, success: terminated, cameras: {main: {size: 48}}, "
PENDULUM = "id: Pendulum-v1, instruction: hold the pendulum up, success: terminated, cameras: {main: {size: 48}}, "
METAWORLD = (
    "id: Meta-World/MT1, imports: [metaworld], instruction: close the drawer, success: success, "
    "kwargs: {env_name: drawer-close-v3, seed: 1, camera_name: corner2, width: 64, height: 64}, "
    "cameras: {main: {size: 48, turn: 180}}, state: observation"
)


class Dots(gymnasium.Env[Any, Any]):
    """A dot that walks to the corner; draws from every generator there is, and refuses a step after its end."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space: ClassVar[Any] = gymnasium.spaces.Dict(
        {
            "pixels": gymnasium.spaces.Box(0, 255, (20, 30, 3), np.uint8),
            "position": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "observation": gymnasium.spaces.Box(0, 255, (4, 4), np.uint8),
        }
    )
    action_space: ClassVar[Any] = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, render_mode: str | None = None, noise: float = 0.0, dark: bool = False) -> None:
        self.render_mode, self._noise, self._dark, self.actions = render_mode, noise, dark, []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Array], dict[str, Any]]:
        super().reset(seed=seed)
        self._position = self.np_random.random(2) / 4
        self._position += np.random.random() / 1000 + random.random() / 1000  # noqa: NPY002
        self._ended = False
        return self._observation(), {}

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        assert not self._ended and action.dtype == np.float64
        self.actions.append(action)
        noise = self.np_random.random() + np.random.random() + random.random()  # noqa: NPY002
        self._position = self._position + action + self._noise * noise
        self._ended = bool(self._position.min() > 1)
        return self._observation(), float(self._position.sum()), self._ended, False, {"is_success": self._ended}

    def _observation(self) -> dict[str, Array]:
        pixels = np.zeros((20, 30, 3), np.uint8)
        pixels[:10] = 200  # the upper half is bright
        x, y = np.clip(self._position * 100, 0, 255).astype(np.uint8)
        pixels[-1, -1] = x, y, 0
        if self._dark:
            pixels[:] = 0
        return {"pixels": pixels, "position": self._position, "observation": np.zeros((4, 4), np.uint8)}


class ReusingDots(Dots):
    """Environment that fills the same arrays in every step and reset."""

    def _observation(self) -> dict[str, Array]:
        observation = super()._observation()
        self._kept = getattr(self, "_kept", None) or {name: array.copy() for name, array in observation.items()}
        for name, array in observation.items():
            self._kept[name][...] = array
        return self._kept


class LateDots(Dots):
    """Dots whose episode also ends below the corner, and that report success at ends alone."""

    def __init__(self, render_mode: str | None = None, silent: bool = False) -> None:
        super().__init__(render_mode)
        self._silent = silent

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        observation, reward, solved, truncated, _ = super().step(action)
        self._ended = solved or bool(self._position.min() < -1)
        info = {"is_success": solved} if self._ended and not self._silent else {}
        return observation, reward, self._ended, truncated, info


class ForgetfulDots(Dots):
    """Dots whose info is empty at the end of an episode."""

    def __init__(self, render_mode: str | None = None, limit: int = 0) -> None:
        super().__init__(render_mode)
        self._limit = limit

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Array], dict[str, Any]]:
        self.actions = []
        return super().reset(seed=seed)

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        observation, reward, solved, _, info = super().step(action)
        truncated = len(self.actions) == self._limit
        return observation, reward, solved, truncated, {} if solved or truncated else info


class TwoArms(gymnasium.Env[Any, Any]):
    """What robots give: nested observations, two cameras of different formats, and a dict of actions."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space: ClassVar[Any] = gymnasium.spaces.Dict(
        {
            "pixels": gymnasium.spaces.Dict(
                {
                    "front": gymnasium.spaces.Box(0, 1, (3, 12, 16), np.float32),
                    "wrist": gymnasium.spaces.Box(0, 255, (3, 12, 16), np.float32),
                }
            ),
            "observation.images.top": gymnasium.spaces.Box(0, 255, (12, 16, 3), np.uint8),
            "robot": gymnasium.spaces.Dict(
                {
                    "joints": gymnasium.spaces.Box(-1, 1, (3,), np.float64),
                    "gripper": gymnasium.spaces.Box(0, 1, (), np.float32),
                }
            ),
        }
    )
    action_space: ClassVar[Any] = gymnasium.spaces.Dict(
        {
            "arm": gymnasium.spaces.Dict({"joints": gymnasium.spaces.Box(-1, 1, (3,), np.float64)}),
            "gripper.width": gymnasium.spaces.Box(0, 0.5, (1,), np.float32),
        }
    )

    def __init__(self, render_mode: str | None = None, brightest: float = 1.0, shrinks: bool = False) -> None:
        self.render_mode, self._brightest, self._shrinks = render_mode, brightest, shrinks
        self.renders, self._joints = 0, np.zeros(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._joints = np.zeros(3)
        return self._observation(), {}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        self.action = action
        self._joints = action["arm"]["joints"]
        if self._shrinks:
            self._joints = self._joints[:2]
        return self._observation(), 0.0, False, False, {"episode": {"is_success": bool(self._joints[0] > 0.9)}}

    def render(self) -> Any:
        self.renders += 1
        return [np.full((12, 16, 3), 10 * number, np.uint8) for number in range(3)]

    def _observation(self) -> dict[str, Any]:
        front = np.zeros((3, 12, 16), np.float32)
        front[0, :6] = self._brightest  # the upper half is red
        return {
            "pixels": {"front": front, "wrist": np.full((3, 12, 16), 100.0, np.float32)},
            "observation.images.top": np.full((12, 16, 3), 7, np.uint8),
            "robot": {"joints": self._joints, "gripper": np.float32(0.25)},
        }


class Pad(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A takeover device: it acts at the second step, and reports that as gym-hil does."""

    def __init__(self, env: Any, action: Any, flag: str = "is_intervention") -> None:
        super().__init__(env)
        self._action, self._flag = action, flag

    def reset(self, **kwargs: Any) -> Any:
        self._steps = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._steps += 1
        acts = self._steps == 2
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, {**info, self._flag: acts, "teleop_action": self._action}


gymnasium.register("tests/TwoArms-v0", TwoArms, max_episode_steps=LIMIT)
gymnasium.register("tests/Dots-v0", Dots, max_episode_steps=LIMIT)
gymnasium.register("tests/Endless-v0", Dots)
gymnasium.register("tests/ReusingDots-v0", ReusingDots, max_episode_steps=LIMIT)
gymnasium.register("tests/LateDots-v0", LateDots, max_episode_steps=LIMIT)
gymnasium.register("tests/ForgetfulDots-v0", ForgetfulDots, max_episode_steps=LIMIT)
DOTS = {
    "id": "tests/Dots-v0",
    "instruction": "walk to the corner",
    "success": "is_success",
    "cameras": {"main": CameraSettings(source="pixels", size=(20, 30))},
    "state": "position",
    "action_low": (-0.5, -1.0),
    "action_high": (0.5, 1.0),
}


ARMS = {
    "id": "tests/TwoArms-v0",
    "instruction": "lift it",
    "success": "episode.is_success",
    "cameras": {
        "front": CameraSettings(source="pixels.front", size=(12, 16)),
        "wrist": CameraSettings(source="pixels.wrist", size=8),
        "top": CameraSettings(source="observation.images.top", size=(12, 16)),
        "side": CameraSettings(source="render.2", size=(12, 16)),
        "back": CameraSettings(source="render.1", size=(12, 16)),
    },
    "state": ("robot.gripper", "robot.joints"),
    "actions": ("gripper.width", "arm.joints"),
    "action_low": None,
    "action_high": None,
}


def make(**changes: Any) -> Any:
    return plugin.build(GymnasiumConfig(**(DOTS | changes)), EnvContext(num_envs=1, chunk=4))


def environment_of(env: Any) -> Any:
    return env.inline_env(0)._env.unwrapped


def start(env: Any, split: str = "train", number: int = 0, seed: int = 0) -> Any:
    state = env.reset_states(split)[number].id
    return env.reset(ONE_ENV, np.array([state]), np.array([seed]))


def act(env: Any, *action: float, stop_at_end: bool = False) -> Any:
    return env.chunk_step(np.tile(np.float32(action), (1, 4, 1)), ON, stop_at_end)


# ------------------------------------------------------------------------------------------ from a spec


@drawn
@pytest.mark.parametrize("text", [CAR + "state: observation", PENDULUM], ids=["mountain car", "pendulum"])
def test_classic_control_from_a_spec_alone(text: str) -> None:
    """Two envs, each in a separate process."""
    spec = parse_spec(SPEC.replace("ENV", text)).env
    load("env", spec.type).preflight(spec.config)  # type: ignore[misc]
    check_env(build("env", spec.type, spec.config, EnvContext(num_envs=2, chunk=4)), chunk=4, seconds=10)


@pytest.mark.sim
@pytest.mark.skipif(find_spec("metaworld") is None, reason="needs pip install -e '.[metaworld]'")
def test_metaworld_from_a_spec_alone() -> None:
    spec = parse_spec(SPEC.replace("ENV", METAWORLD)).env
    env = build("env", spec.type, spec.config, EnvContext(num_envs=1, chunk=2))
    assert (env.info.tasks[0].name, env.info.tasks[0].max_steps, env.info.state_dim) == ("Meta-World-MT1", 500, 39)
    check_env(env, num_envs=1, chunk=2, seconds=10)


@pytest.mark.parametrize("block", range(9))
def test_the_specs_of_the_page_are_right(block: int) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulators" / "gymnasium.md").read_text()
    (section,) = re.findall(r"```yaml\n(env:.*?)```", page, flags=re.DOTALL)[block : block + 1]
    spec = parse_spec(re.sub(r"env: .*\n", lambda _: section, SPEC, count=1))
    assert (spec.env.type, spec.env.num_envs) == ("gymnasium", 4)


@drawn
def test_a_training_step(tmp_path: Path) -> None:
    results = run(parse_spec(SPEC.replace("ENV", PENDULUM + "max_steps: 8")), tmp_path / "run", resume=False)
    assert results["steps"] == 1 and results["success"]["n"] == 1
    assert "success in Pendulum-v1 means that it ended by itself (terminated)" in results["notes"]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["rollout/env_steps"] == 32 and line["env/episode_length"] == 8
    assert line["env/return"] < 0 and line["policy/grad_norm"] > 0


# ------------------------------------------------------------------------------------- what an env does


def test_images_state_and_bounds_of_a_dict_observation() -> None:
    env = make()
    seen = start(env)
    pixels, position = seen.images["main"][0], seen.state[0]
    assert pixels.shape == (20, 30, 3) and (pixels[:10] == 200).all() and (pixels[10:19] == 0).all()
    assert np.array_equal(pixels[-1, -1, :2], (position * 100).astype(np.uint8))
    act(env, 9.0, -9.0)
    assert np.array_equal(environment_of(env).actions[-1], [0.5, -1.0]), "clipped to the bounds given"
    assert env.info.action_low == (-0.5, -1.0) and env.info.tasks[0].max_steps == LIMIT
    assert env.info.notes == ("success in tests/Dots-v0 means info['is_success']",)
    turned = make(cameras={"top": CameraSettings(source="pixels", size=(30, 20), turn=90)})
    image = start(turned).images["top"][0]
    assert (image[:, :10] == 200).all() and (image[:, 11:19] == 0).all()
    resized = make(cameras={"main": CameraSettings(source="pixels", size=10)})
    image = start(resized).images["main"][0]
    assert image.shape == (10, 10, 3) and (image[:4] == 200).all() and (image[6:9] == 0).all()


@pytest.mark.sim
@pytest.mark.skipif(find_spec("mujoco") is None, reason="needs pip install mujoco")
def test_fast_render_draws_the_same_scene_without_shadows() -> None:
    ant: dict[str, Any] = {
        "id": "Ant-v5",
        "cameras": {"main": CameraSettings(size=64)},
        "success": "terminated",
        "state": "observation",
        "action_low": None,
        "action_high": None,
    }
    usual, fast = make(**ant), make(**ant, fast_render=True)
    before, after = start(usual), start(fast)
    assert np.array_equal(before.state, after.state), "the same physics"
    difference = np.abs(before.images["main"].astype(int) - after.images["main"])
    assert 1 < difference.mean() < 30, "another drawing of the same scene"
    assert environment_of(fast).model.vis.quality.shadowsize == 0 < environment_of(usual).model.vis.quality.shadowsize
    assert "fast_render: no shadows, reflections or multisampling" in fast.info.notes
    for env, image in ((usual, before), (fast, after), (usual, before)):
        assert np.array_equal(start(env).images["main"], image.images["main"]), "each draws into its own context"


def test_images_of_one_colour_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    env = make(kwargs={"dark": True})
    start(env)
    start(env)
    assert caplog.text.count("has one colour, (0, 0, 0): is anything drawn") == 1
    start(make())
    assert caplog.text.count("has one colour") == 1


def test_fast_render_is_refused_without_mujoco() -> None:
    with pytest.raises(UserError, match="fast_render: tests/Dots-v0 has no MuJoCo model when it is created"):
        make(fast_render=True)


def test_a_state_fixes_the_start_and_the_seed_what_is_drawn_later() -> None:
    env = make(kwargs={"noise": 0.01})
    np.random.randn()  # noqa: NPY002  keeps a second one in store
    before = random.getstate(), np.random.get_state()  # noqa: NPY002

    def positions(number: int, seed: int) -> Array:
        return np.array([start(env, "train", number, seed).state[0], act(env, 0.0, 0.0).obs.state[0]])

    one, other_seed, other_state = positions(3, 5), positions(3, 6), positions(4, 5)
    assert np.array_equal(positions(3, 5), one)
    assert np.array_equal(one[0], other_seed[0]) and not np.array_equal(one[1], other_seed[1])
    assert not np.array_equal(one[0], other_state[0])
    assert random.getstate() == before[0]
    after = np.random.get_state()  # noqa: NPY002
    assert np.array_equal(after[1], before[1][1]) and after[2:] == before[1][2:]


def test_splits_share_no_seed() -> None:
    env = make(train_states=40, eval_states=30)
    starts = {
        (split, i): tuple(start(env, split, i).state[0]) for split, n in (("train", 40), ("eval", 30)) for i in range(n)
    }
    assert len(set(starts.values())) == 70
    assert (len(env.reset_states("train")), len(env.reset_states("eval"))) == (40, 30)


def test_an_end_is_shown_and_nothing_happens_after_it() -> None:
    """The environment above fails where it is stepped after its end, as gymnasium allows it to."""
    env = make()
    start(env)
    act(env, 0.2, 0.2, stop_at_end=True)
    solved = act(env, 0.5, 0.5)
    first = int(solved.terminated[0].argmax())
    assert solved.terminated[0].tolist() == solved.succeeded[0].tolist() == [i >= first for i in range(4)]
    assert solved.executed.all() and solved.success[0] and not solved.truncated.any()
    assert (solved.rewards[0, first + 1 :] == 0).all() and solved.rewards[0, first] > 2
    again = act(env, -0.5, -0.5)
    assert again.terminated.all() and not again.rewards.any() and np.array_equal(again.obs.state, solved.obs.state)


def test_the_last_observation_outlives_a_reset_that_reuses_its_arrays() -> None:
    """gymnasium's vector environments in SAME_STEP mode give the first observation of the next episode instead."""
    env = make(id="tests/ReusingDots-v0")
    start(env)
    solved = act(env, 0.5, 0.5)
    state, image = solved.obs.state.copy(), solved.obs.images["main"].copy()
    assert solved.terminated.any() and state.min() > 1
    start(env, number=1)
    assert environment_of(env)._kept["position"].max() < 1
    assert np.array_equal(solved.obs.state, state) and np.array_equal(solved.obs.images["main"], image)


def test_the_time_limit_of_gymnasium_truncates() -> None:
    env = make()
    start(env)
    assert not act(env, 0.0, 0.0).truncated.any()
    result = act(env, 0.0, 0.0, stop_at_end=True)
    assert result.executed[0].tolist() == [True, True, False, False]
    assert result.truncated[0].tolist() == [False, True, False, False]
    assert not result.terminated.any() and not result.success[0]
    longer = make(id="tests/Endless-v0", max_steps=3)
    start(longer)
    assert act(longer, 0.0, 0.0, stop_at_end=True).executed.sum() == longer.info.tasks[0].max_steps == 3


@drawn
def test_wrappers_are_put_around_in_order() -> None:
    config: dict[str, Any] = {
        "id": "MountainCarContinuous-v0",
        "success": "terminated",
        "kwargs": {"render_mode": "rgb_array"},
        "wrappers": (
            Wrapper(name="RescaleAction", kwargs={"min_action": -4, "max_action": 4}),
            Wrapper(
                name="gymnasium.wrappers:AddRenderObservation",
                kwargs={"render_only": False, "render_key": "seen", "obs_key": "car"},
            ),
        ),
        "cameras": {"main": CameraSettings(source="seen", size=32)},
        "state": "car",
        "action_low": None,
        "action_high": None,
    }
    env = make(**config)
    assert (env.info.action_low, env.info.action_high) == ((-4.0,), (4.0,))
    view = start(env)
    assert view.state.shape == (1, 2) and view.images["main"].std() > 0
    env.close()


def test_several_cameras_joined_states_and_dict_actions() -> None:
    env = make(**ARMS)
    obs = start(env)
    assert list(obs.images) == ["front", "wrist", "top", "side", "back"]
    assert (obs.images["front"][0, :6] == [255, 0, 0]).all() and not obs.images["front"][0, 6:].any()
    assert obs.images["wrist"].shape == (1, 8, 8, 3) and (obs.images["wrist"] == 100).all()
    assert [int(obs.images[name].max()) for name in ("top", "side", "back")] == [7, 20, 10]
    assert environment_of(env).renders == 1, "one call of render for both cameras"
    assert obs.state.tolist() == [[0.25, 0, 0, 0]]
    assert env.info.action_low == (0.0, -1.0, -1.0, -1.0) and env.info.action_high == (0.5, 1.0, 1.0, 1.0)
    result = act(env, 9.0, 0.1, 0.2, 0.3)
    action = environment_of(env).action
    assert action["gripper.width"].tolist() == [0.5] and action["gripper.width"].dtype == np.float32
    assert np.allclose(action["arm"]["joints"], [0.1, 0.2, 0.3]) and action["arm"]["joints"].dtype == np.float64
    assert np.allclose(result.obs.state, [[0.25, 0.1, 0.2, 0.3]]) and not result.success[0]
    assert act(env, 0.0, 1.0, 0.0, 0.0).success[0], "success at a path of the info"


def test_without_cameras_the_policy_sees_what_render_returns() -> None:
    env = make(**ARMS | {"cameras": {}})
    assert env.info.cameras == {"main": (224, 224)} and env.info.state_dim == 4


def with_pad(action: Any, **kwargs: Any) -> dict[str, Any]:
    wrapper = Wrapper(name=f"{__name__}:Pad", kwargs={"action": action, **kwargs})
    return ARMS | {"wrappers": (wrapper,), "interventions": InterventionSettings()}


def test_actions_in_real_time_wait_and_late_ones_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock in place of the real one: episodes restart it, and it says that the second action is late."""
    calls: list[str] = []

    class Clock:
        def __init__(self, control_hz: float | None) -> None:
            calls.append(f"{control_hz} Hz")

        def restart(self) -> None:
            calls.append("restart")

        def wait(self) -> bool:
            calls.append("wait")
            return calls.count("wait") == 2

    monkeypatch.setattr(single_env, "RealTime", Clock)
    env = make(control_hz=20.0)
    start(env)
    result = act(env, 0.0, 0.0)
    assert calls == ["20.0 Hz", "restart", "wait", "wait", "wait", "wait"] and env.info.control_hz == 20.0
    assert result.late.tolist() == [[False, True, False, False]]
    with pytest.raises(UserError, match="control_hz is real time, which envs that take turns in a process cannot keep"):
        plugin.build(
            GymnasiumConfig(**DOTS, control_hz=20.0, processes=Processes(envs_per_process=2)),
            EnvContext(num_envs=2, chunk=4),
        )


def test_takeovers_are_read_from_the_info() -> None:
    """The executed action, a dict, comes back in the order of the policy's numbers."""
    env = make(**with_pad({"arm": {"joints": [0.1, 0.2, 0.3]}, "gripper.width": [0.4]}))
    start(env)
    result = act(env, 0.0, 0.0, 0.0, 0.0)
    assert env.info.takeovers and result.source.dtype == np.int8
    assert result.source.tolist() == [
        [ActionSource.POLICY, ActionSource.PERSON, ActionSource.POLICY, ActionSource.POLICY]
    ]
    assert np.allclose(result.executed_actions[0, 1], [0.4, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (with_pad({"arm": {"joints": [0.1, 0.2]}, "gripper.width": [0.4]}), "does not fit the action space at arm.joints: "),
        (with_pad({"gripper.width": [0.4]}), r"does not fit the action space at arm.joints: .*KeyError"),
        (with_pad({}, flag="helped"), r"interventions: the info of tests/TwoArms-v0 has no entry 'is_intervention'\n  entries: .*helped"),
    ],
    ids=["a joint too few", "no arm", "no flag"],
)  # fmt: skip
def test_takeovers_that_are_reported_wrongly_are_named(changes: dict[str, Any], message: str) -> None:
    env = make(**changes)
    start(env)
    with pytest.raises(UserError, match=message):
        act(env, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": {"front": CameraSettings(source="pixels.frnt")}}, r"cameras.front.source: .* has no entry 'pixels.frnt'; did you mean 'pixels.front'\?\n  entries: .*pixels.wrist"),
        ({"cameras": {"front": CameraSettings(source="pixels")}}, r"cameras.front.source 'pixels' of tests/TwoArms-v0 is Dict\(.*not an image"),
        ({"state": ("robot.joints", "robot")}, "state 'robot' of tests/TwoArms-v0 is Dict"),
        ({"actions": ()}, r"takes a dict of actions; give all of its entries in the order of the policy's numbers: actions: \[arm.joints, gripper.width\]$"),
        ({"actions": ("arm.joints", "gripper")}, "; missing: gripper.width; unknown: gripper$"),
        (DOTS | {"actions": ("x",)}, "actions: tests/Dots-v0 takes actions of Box.*not of a Dict; leave `actions` out"),
    ],
)  # fmt: skip
def test_entries_that_are_not_there_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**ARMS | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": {"side": CameraSettings(source="render")}}, r"render\(\) of tests/TwoArms-v0 gives several images; choose one of render.0, render.1, render.2"),
        ({"cameras": {"side": CameraSettings(source="render.3")}}, r"has no entry '3'.*\n  entries: 0, 1, 2"),
        ({"kwargs": {"brightest": 2.0}}, "pixels.front of tests/TwoArms-v0 gave floats from 0 to 2; an image of floats has numbers from 0 to 1"),
        ({"kwargs": {"brightest": float("nan")}}, "gave floats from nan to nan"),
    ],
)  # fmt: skip
def test_images_that_are_none_are_named_at_the_reset(changes: dict[str, Any], message: str) -> None:
    env = make(**ARMS | changes)
    with pytest.raises(UserError, match=message):
        start(env)


def test_a_state_whose_length_changes_is_named() -> None:
    env = make(**ARMS | {"kwargs": {"shrinks": True}})
    start(env)
    with pytest.raises(
        UserError, match="state 'robot.joints' of tests/TwoArms-v0 has 2 numbers now, and its space says 3"
    ):
        act(env, 0.0, 0.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("id: Pendulum-v1, success: terminated", "env.instruction: required, but missing"),
        ("id: Pendulum-v1, success: terminated, instruction: ' '", "env.instruction: is empty"),
        ("id: Pendulum-v1, instruction: x", "env.success: required, but missing"),
        (PENDULUM.replace("48", "0"), "env.cameras.main.size: 0 pixels; give 8 to 1024"),
        (PENDULUM.replace("48", "[64, 4096]"), "env.cameras.main.size: 4096 pixels; give 8 to 1024"),
        (
            PENDULUM.replace("size: 48", "turn: 45"),
            "env.cameras.main.turn: expected one of 0, 90, 180, 270, got int 45",
        ),
        (PENDULUM + "kwargs: {max_episode_steps: 3}", "max_episode_steps is the setting max_steps"),
        (PENDULUM + "action_low: [-1]", "give both action_low and action_high, or neither"),
        (PENDULUM + "action_low: [-1], action_high: [-1]", "is not below action_high"),
        (PENDULUM + "action_low: [-1], action_high: [1, 1]", "1 lower and 2 upper bounds"),
        (PENDULUM + "state: [observation, observation]", "env.state: observation given more than once"),
        (PENDULUM + "state: []", "env.state: is an empty list"),
        (PENDULUM + "eval_states: 0", "'eval_states' must be >= 1"),
        (PENDULUM + "wrappers: [{kwargs: {}}]", "env.wrappers.0.name: required, but missing"),
    ],
)
def test_bad_settings_are_refused(keys: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(SPEC.replace("ENV", keys))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "Pendulm-v1"}, r"no gymnasium environment 'Pendulm-v1'; did you mean 'Pendulum-v1'\?\n  registered: Acrobot-v1, "),
        ({"id": "CartPole-v1"}, r"CartPole-v1 takes actions of Discrete\(2\), .* must be a Box of floats with one dimension, or a Dict of Boxes\n  choose"),
        ({"action_low": None, "action_high": None}, "takes actions without bounds, .*: action_low and action_high, 2 numbers each"),
        ({"action_low": (0.0,), "action_high": (1.0,)}, "action_low has 1 numbers, and tests/Dots-v0 takes actions of 2"),
        ({"id": "Pendulum-v1", "action_low": (-3.0,), "action_high": (1.0,)}, "reach beyond what Pendulum-v1 takes"),
        ({"id": "tests/Endless-v0"}, "tests/Endless-v0 is registered without a step limit; give max_steps"),
        ({"cameras": {"main": CameraSettings()}}, "images come from render mode 'rgb_array'; tests/Dots-v0 was made with 'rgb_array' and has none\n"),
        ({"cameras": {"main": CameraSettings()}, "id": "Pendulum-v1", "kwargs": {"render_mode": "human"}}, "was made with 'human' and has human, rgb_array"),
        ({"cameras": {"main": CameraSettings(source="pixel")}}, r"cameras.main.source: .* has no entry 'pixel'; did you mean 'pixels'\?\n  entries: observation, "),
        ({"cameras": {"main": CameraSettings(source="observation")}}, r"is Box\(0, 255, \(4, 4\), uint8\), not an image: .height, width, 3. or "),
        ({"state": "pixels"}, "state 'pixels' of tests/Dots-v0 is .*; a state is a Box of one dimension, or a number"),
        ({"kwargs": {"nois": 1}}, "cannot be made with these arguments: TypeError: .*unexpected keyword argument 'nois'"),
        ({"imports": ("no_such_module",)}, "imports: no module named 'no_such_module'"),
        ({"wrappers": (Wrapper(name="ClipActions"),)}, r"no wrapper 'ClipActions'; did you mean 'ClipAction'\?\n  those of gymnasium: "),
        ({"wrappers": (Wrapper(name="gymnasium:Clip"),)}, "wrappers: module 'gymnasium' has no 'Clip'"),
        ({"wrappers": (Wrapper(name="gymnasium:Env"),)}, "wrappers: gymnasium:Env is not a gymnasium.Wrapper"),
        ({"wrappers": (Wrapper(name="RescaleAction"),)}, "wrapper RescaleAction cannot be made with these arguments: "),
        ({"wrappers": (Wrapper(name="Autoreset"),)}, "is wrapped in Autoreset, which starts the next episode by itself"),
        ({"wrappers": (Wrapper(name="NormalizeReward"),)}, "is wrapped in NormalizeReward, which keeps statistics over episodes"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**changes)


@drawn
def test_trying_out_names_a_success_that_is_not_reported() -> None:
    spec = parse_spec(SPEC.replace("ENV", CAR.replace("terminated", "solved, max_steps: 3"))).env
    load("env", "gymnasium").preflight(spec.config)  # type: ignore[misc]  # it may be reported at another end
    env = make(success="is_succes", max_steps=4)
    start(env)
    with pytest.raises(
        UserError, match=r"has no entry 'is_succes'; did you mean 'is_success'\?\n  entries: is_success; "
    ):
        act(env, 0.0, 0.0)


def test_success_may_be_reported_at_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    late = {"id": "tests/LateDots-v0"}
    check_env(make(**late), num_envs=1, chunk=2, seconds=10)
    caplog.clear()
    for action, solved in ((0.5, True), (-0.5, False)):
        env = make(**late)
        start(env)
        result = act(env, action, action, stop_at_end=True)
        assert result.terminated.any() and bool(result.success[0]) is solved
        assert result.succeeded[0].sum() == solved, "not before the end"
    assert not caplog.records
    start(env)
    for _ in range(2):
        result = act(env, 0.0, 0.0, stop_at_end=True)
    assert result.truncated.any() and not result.success[0]
    assert [record.getMessage().partition(" has ")[0] for record in caplog.records] == [
        "success: at its step limit, the info of tests/LateDots-v0"
    ]
    silent = make(**late, kwargs={"silent": True})
    start(silent)
    with pytest.raises(UserError, match="at the end of an episode, the info of tests/LateDots-v0 has no entry"):
        act(silent, 0.5, 0.5)


@pytest.mark.parametrize(("action", "limit"), [(0.5, 0), (0.0, 3)], ids=["terminated", "truncated"])
def test_an_info_that_loses_its_entries_at_the_end_is_named(action: float, limit: int) -> None:
    env = make(id="tests/ForgetfulDots-v0", kwargs={"limit": limit})
    start(env)
    with pytest.raises(UserError, match="ForgetfulDots-v0 loses 'is_success', which it had after earlier actions"):
        act(env, action, action, stop_at_end=True)


def test_a_check_finds_an_info_that_loses_its_entries_at_the_end() -> None:
    with pytest.raises(CheckFailed, match="ForgetfulDots-v0 loses 'is_success'"):
        check_env(make(id="tests/ForgetfulDots-v0", kwargs={"limit": 3}), num_envs=1, chunk=2, seconds=4)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)  # as if it were not installed
    env = make(
        id="Pendulum-v1",
        success="terminated",
        cameras={"main": CameraSettings(size=32)},
        state=None,
        action_low=None,
        action_high=None,
    )
    with pytest.raises(UserError, match="Pendulum-v1 needs a package .*pip install .gymnasium.classic_control"):
        start(env)
