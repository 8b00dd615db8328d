"""Simulators that `simulator_conventions.py` measures: the packages as they are, and our plugins."""

# ruff: noqa: SLF001 - poses and cameras of scenes have no public names

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np

from simulator_conventions import FLIPS, SIZE, Array, MujocoTruth, Player, SapienTruth, Step, Truth, keep_quiet

LIBERO_HAND = ("gripper0_grip_site", "robot0_right_hand")
LIBERO_FINGERS = ("gripper0_finger_joint1", "gripper0_finger_joint2")
MOST = 200
"""Most actions of an episode that is to be solved."""
METAWORLD_TASK, METAWORLD_CAMERA = "drawer-close-v3", "corner2"
METAWORLD_HAND = ("hand", "hand")
METAWORLD_FINGERS = ("rightpad", "leftpad")
HIL_HAND = ("pinch", "base")
HIL_FINGERS = ("left_pad", "right_pad")


class PluginPlayer(Player):
    """One of our plugins. A seed is the number of an evaluation state."""

    gripper = -1

    def __init__(self, name: str, settings: dict[str, Any], still: Sequence[float], find_truth: Any) -> None:
        from vla_rl.core.catalogue import load
        from vla_rl.core.contexts import EnvContext

        plugin = load("env", name)
        self._config = plugin.config
        with keep_quiet():
            self.env: Any = plugin.build(plugin.config(**settings), EnvContext(num_envs=1, chunk=1))
        self.info = self.env.info
        self.low, self.high = np.array(self.info.action_low), np.array(self.info.action_high)
        self.still = np.array(still, np.float32)
        self._find_truth = find_truth
        self._resets = 0
        self.executed: list[Array] = []
        """Actions of the episode so far."""

    @property
    def inner(self) -> Any:
        """The env object, which lives in this process."""
        return self.env.inline_env(0)

    @property
    def truth(self) -> Truth:  # type: ignore[override]
        found: Truth = self._find_truth(self.inner)
        return found

    def reset(self, seed: int) -> None:
        state = self.env.reset_states("eval")[seed].id
        self._resets += 1  # another seed each time: the state alone decides the scene
        self.observation = self.env.reset(np.zeros(1, np.int64), np.array([state]), np.array([self._resets]))
        self.executed = []

    def step(self, action: Array) -> Step:
        outcome = self.inner.step(np.asarray(action, np.float32))
        self.executed.append(np.asarray(action, np.float32))
        kind = describe_type(outcome.success)
        return Step(outcome.reward, outcome.terminated, outcome.truncated, outcome.success, f"success: {kind}")

    def draw_image(self) -> Array:
        return np.asarray(self.inner.render().images[next(iter(self.info.cameras))])

    def read_state(self) -> Array:
        return np.asarray(self.inner.render().state)

    def read_sentence(self) -> str:
        self.reset(0)
        (sentence,) = self.observation.instructions
        varies = ", another one in each scene" if self.info.tasks[0].instruction_varies else ""
        return f"{sentence!r}{varies}"

    def list_cameras(self) -> str:
        """Return the default of the setting `cameras`, or the cameras there are."""
        from attrs import Factory, fields_dict

        default = getattr(fields_dict(self._config).get("cameras"), "default", self.info.cameras)
        return ", ".join(default.factory() if isinstance(default, Factory) else default)  # type: ignore[arg-type]

    def solve_task(self) -> Step:
        """Play the first state by the plugin's expert, or by the person who takes over."""
        self.reset(0)
        for _ in range(MOST):
            action = self.still if self.info.takeovers else self.inner.expert_chunk(1)[0]
            step = self.step(action)
            if step.success:
                return step
        raise AssertionError(f"the expert did not solve it in {MOST} actions")

    def close(self) -> None:
        self.env.close()


class BatchPlayer(PluginPlayer):
    """One of our plugins whose envs are steps of one program on tensors."""

    observation: Any

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        still: Sequence[float],
        find_truth: Any,
        choose_action: Callable[[Any], Array],
    ) -> None:
        """
        Args:
            choose_action: scripted policy that solves the task, from the player.
        """
        super().__init__(name, settings, still, find_truth)
        self._choose_action = choose_action
        self.script: Any = None
        """Memory of `choose_action`."""

    @property
    def inner(self) -> Any:
        return self.env

    def step(self, action: Array) -> Step:
        actions = np.asarray(action, np.float32)[None, None]
        result = self.env.chunk_step(actions, np.array([True]), False)
        assert not self.env.faults()
        self.executed.append(actions[0, 0])
        self.observation = result.obs
        success = bool(result.success[0])
        ends = bool(result.terminated[0, 0]), bool(result.truncated[0, 0])
        return Step(float(result.rewards[0, 0]), *ends, success, f"success: {describe_type(success)}")

    def draw_image(self) -> Array:
        return np.asarray(self.observation.images[next(iter(self.info.cameras))][0])

    def read_state(self) -> Array:
        return np.asarray(self.observation.state[0])

    def solve_task(self) -> Step:
        self.reset(0)
        for _ in range(MOST):
            step = self.step(self._choose_action(self))
            if step.success:
                return step
        raise AssertionError(f"the script did not solve it in {MOST} actions")


class GymPlayer(Player):
    """An environment of gymnasium as its package makes it."""

    gripper = -1

    def __init__(
        self,
        env: Any,
        still: Sequence[float],
        truth: Truth,
        success: str,
        image: Callable[[Any], Array],
        choose_action: Callable[[Any], Array],
        read_state: Callable[[Any], Array],
        cameras: str = "one, by render()",
    ) -> None:
        """
        Args:
            success: key of the info that says whether the task is solved.
            choose_action: scripted policy that solves the task.
            read_state: what an observation says of the robot.
            cameras: those of an observation, in their order.
        """
        self.env = env
        self._choose_action = choose_action
        self.low, self.high = env.action_space.low, env.action_space.high
        self.still = np.array(still, np.float32)
        self.truth = truth
        self._success = success
        self._image = image
        self._read = read_state
        self._cameras = cameras
        self.script: Any = None
        """Memory of `choose_action`."""

    def reset(self, seed: int) -> None:
        with keep_quiet():
            self.observation, self.info = self.env.reset(seed=seed)

    def step(self, action: Array) -> Step:
        self.observation, reward, terminated, truncated, self.info = self.env.step(np.asarray(action, np.float32))
        said = self.info.get(self._success)
        kind = f"info['{self._success}']: {describe_type(said)}"
        return Step(float(reward), bool(terminated), bool(truncated), None if said is None else bool(said), kind)

    def draw_image(self) -> Array:
        return self._image(self)

    def read_state(self) -> Array:
        return np.asarray(self._read(self.observation))

    def read_sentence(self) -> str:
        """Return what the environment offers a policy in words."""
        names = [name for name in dir(self.env.unwrapped) if "instruction" in name or "language" in name]
        return ", ".join(names) or "none"

    def list_cameras(self) -> str:
        return self._cameras

    def solve_task(self) -> Step:
        self.reset(0)
        for _ in range(MOST):
            step = self.step(self._choose_action(self))
            if step.success:
                return step
        raise AssertionError(f"the script did not solve it in {MOST} actions")

    def close(self) -> None:
        self.env.close()


def describe_type(value: Any) -> str:
    """Return the type of a value, with the dtype and shape of an array."""
    name = type(value).__name__
    return f"tensor {value.dtype} {list(value.shape)}" if name == "Tensor" else name


class LiberoPlayer(Player):
    """LIBERO's own environment under the protocol of OpenVLA's evaluation, without the ten settling steps."""

    gripper = -1

    def __init__(self) -> None:
        with keep_quiet():
            envs = import_module("libero.libero.envs")
            from vla_rl.plugins.envs.libero.suites import Suite

            suite = Suite("libero_spatial")
            self.env: Any = envs.OffScreenRenderEnv(
                bddl_file_name=suite.tasks[0].bddl_file, camera_heights=SIZE, camera_widths=SIZE
            )
            self.env.seed(0)
            self.env.reset()
        self._states = suite.initial_states(0)
        self.low, self.high = -np.ones(7), np.ones(7)
        self.still = np.array([0.0] * 6 + [-1.0])
        sim = self.env.env.sim
        self.truth = MujocoTruth(sim.model._model, sim.data._data, "agentview", LIBERO_HAND, LIBERO_FINGERS)
        self._switch_cameras(False)

    def _switch_cameras(self, on: bool) -> None:
        for name in ("agentview_image", "robot0_eye_in_hand_image"):
            for attribute in ("enabled", "active"):
                self.env.env.modify_observable(name, attribute, on)

    def reset(self, seed: int) -> None:
        self.observation = self.env.set_init_state(self._states[seed])
        self.env.env.timestep = 0
        robot = self.env.env.robots[0]
        self.truth.data.qacc_warmstart[:] = 0
        robot.gripper.current_action = np.zeros(1)
        robot.controller.update(force=True)
        robot.controller.reset_goal()

    def step(self, action: Array) -> Step:
        self.observation, reward, done, info = self.env.step(np.asarray(action, np.float64))
        return Step(float(reward), bool(done), "truncated" in info, bool(done), f"done: {describe_type(done)}")

    def read_state(self) -> Array:
        names = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
        return np.concatenate([self.observation[name] for name in names])

    def read_sentence(self) -> str:
        benchmark = import_module("libero.libero.benchmark")
        with keep_quiet():
            task = benchmark.get_benchmark("libero_spatial")().get_task(0)
        return f"{task.language!r}, from the file's name; the file says {self.env.language_instruction!r}"

    def list_cameras(self) -> str:
        """Return the default of the environment's argument."""
        envs = import_module("libero.libero.envs.env_wrapper")
        return ", ".join(signature(envs.ControlEnv.__init__).parameters["camera_names"].default)

    def solve_task(self) -> Step:
        """Play the actions of our plugin's expert, from the official start that both have."""
        plugin = open_libero_plugin()
        plugin.solve_task()
        plugin.close()
        with keep_quiet():
            self.env.reset()
        self._switch_cameras(False)
        self.env.set_init_state(self._states[0])
        for action in [self.still] * 10 + plugin.executed:
            step = self.step(action)
        assert step.success, "the same actions did not solve LIBERO's own environment"
        return step

    def draw_image(self) -> Array:
        self._switch_cameras(True)
        image = self.env.env._get_observations(force_update=True)["agentview_image"]
        self._switch_cameras(False)
        return np.asarray(image)

    def close(self) -> None:
        self.env.close()


# --------------------------------------------------------------------------------------------- what there is


def open_libero() -> LiberoPlayer:
    return LiberoPlayer()


def open_libero_plugin() -> PluginPlayer:
    def find_truth(inner: Any) -> Truth:
        scene = inner._current_scene
        return MujocoTruth(scene._model, scene._data, "agentview", LIBERO_HAND, LIBERO_FINGERS)

    settings = {"suite": "libero_spatial", "tasks": (0,), "cameras": {"agentview": SIZE}}
    return PluginPlayer("libero", settings, [0.0] * 6 + [-1.0], find_truth)


def open_metaworld() -> GymPlayer:
    import gymnasium

    import_module("metaworld")
    env: Any = gymnasium.make(
        "Meta-World/MT1",
        env_name=METAWORLD_TASK,
        render_mode="rgb_array",
        camera_name=METAWORLD_CAMERA,
        width=SIZE,
        height=SIZE,
    )
    inner = env.unwrapped
    truth = MujocoTruth(inner.model, inner.data, METAWORLD_CAMERA, METAWORLD_HAND, METAWORLD_FINGERS)
    return GymPlayer(
        env, [0.0] * 4, MetaWorldTruth(truth, inner), "success", draw_gymnasium, follow_script, lambda seen: seen[:4]
    )


def draw_gymnasium(player: Any) -> Array:
    return np.asarray(player.env.render())


def draw_gym_hil(player: Any) -> Array:
    return np.asarray(player.env.unwrapped.render()[0])


def follow_script(player: Any) -> Array:
    """Return the action of Meta-World's own policy."""
    policies = import_module("metaworld.policies").ENV_POLICY_MAP
    return np.asarray(np.clip(policies[METAWORLD_TASK]().get_action(player.observation), -1, 1))


def pick_cube(player: Any) -> Array:
    """Return the action of our expert in the player's scene."""
    from vla_rl.plugins.envs.maniskill.expert import EXPERTS, METRES_PER_UNIT

    goal, gripper = EXPERTS["PickCube-v1"](player.env.unwrapped)
    way = (goal[0].numpy() - player.truth.read_hand()[0]) / METRES_PER_UNIT
    return np.array([*np.clip(way, -1, 1), 0.0, 0.0, 0.0, float(gripper)])


def lift_cube(player: Any) -> Array:
    """Return the action of our scripted person in the player's scene."""
    from vla_rl.plugins.envs.gym_hil.env import CLOSE, OPEN, ScriptedPerson

    if player.script is None or player.info.get("succeed") is None:
        player.script = ScriptedPerson(player.env.unwrapped, after=0, steps=None)
    player.script.update()
    gripper = {OPEN: 0.0, CLOSE: 2.0}.get(player.script.gripper_command(), 1.0)
    return np.append(player.script.get_deltas(), gripper)


def open_metaworld_plugin() -> PluginPlayer:
    def find_truth(inner: Any) -> Truth:
        env = inner._scene._env
        truth = MujocoTruth(env.model, env.data, METAWORLD_CAMERA, METAWORLD_HAND, METAWORLD_FINGERS)
        return MetaWorldTruth(truth, env)

    settings = {"tasks": (METAWORLD_TASK,), "cameras": {METAWORLD_CAMERA: SIZE}, "max_steps": 500}
    return PluginPlayer("metaworld", settings, [0.0] * 4, find_truth)


class MetaWorldTruth(MujocoTruth):
    """MuJoCo's data, and Meta-World's own names for the scene."""

    def __init__(self, truth: MujocoTruth, env: Any) -> None:
        vars(self).update(vars(truth))
        self._env = env

    def read_numbers(self) -> dict[str, Array]:
        fingers = np.linalg.norm(self.data.body("rightclaw").xpos - self.data.body("leftclaw").xpos)
        opening = np.clip(fingers / 0.1, 0.0, 1.0)
        return {"position": self.data.body("hand").xpos.copy(), "opening 0 to 1": np.array([opening])}

    def read_things(self) -> Array:
        return np.array([self._env._target_pos, self._env._last_rand_vec[:3]])


def open_maniskill() -> GymPlayer:
    import gymnasium

    from vla_rl.toolkit.envs.vulkan import use_unpacked_driver

    use_unpacked_driver()
    import_module("mani_skill.envs")
    env: Any = gymnasium.make(
        "PickCube-v1",
        obs_mode="rgb",
        control_mode="pd_ee_delta_pose",
        sim_backend="physx_cpu",
        render_backend="cpu",
        sensor_configs={"width": SIZE, "height": SIZE},
    )
    truth, cameras = SapienTruth(lambda: env.unwrapped), ", ".join(env.unwrapped._sensors)
    still = [0.0] * 6 + [1.0]
    return GymPlayer(env, still, truth, "success", draw_maniskill, pick_cube, join_maniskill, cameras)


def join_maniskill(seen: Any) -> Array:
    """Return the joints and the hand's pose of an observation."""
    return np.concatenate([np.asarray(seen["agent"]["qpos"][0]), np.asarray(seen["extra"]["tcp_pose"][0])])


def draw_maniskill(player: Any) -> Array:
    return np.asarray(player.observation["sensor_data"][SapienTruth.camera]["rgb"][0])


def open_maniskill_plugin() -> PluginPlayer:
    from vla_rl.toolkit.envs.vulkan import use_unpacked_driver

    use_unpacked_driver()
    settings = {"task": "PickCube-v1", "cameras": {SapienTruth.camera: SIZE}, "backend": "cpu"}
    return PluginPlayer("maniskill", settings, [0.0] * 6 + [1.0], lambda inner: SapienTruth(lambda: inner._scene.env))


def open_gym_hil() -> GymPlayer:
    import gymnasium

    import_module("gym_hil")
    wrappers = import_module("gym_hil.wrappers.hil_wrappers")
    base: Any = gymnasium.make("gym_hil/PandaPickCubeBase-v0", image_obs=False, random_block_position=True)
    env = wrappers.EEActionWrapper(base, ee_action_step_size=dict.fromkeys("xyz", 0.025), use_gripper=True)
    inner = base.unwrapped
    truth = MujocoTruth(inner.model, inner.data, "front", HIL_HAND, HIL_FINGERS)
    seeing: Any = gymnasium.make("gym_hil/PandaPickCubeBase-v0", image_obs=True)
    cameras = ", ".join(seeing.observation_space["pixels"])
    seeing.close()
    still = [0.0] * 3 + [1.0]
    return GymPlayer(env, still, truth, "succeed", draw_gym_hil, lift_cube, lambda seen: seen["agent_pos"], cameras)


def open_gym_hil_plugin() -> PluginPlayer:
    from vla_rl.plugins.envs.gym_hil.config import ScriptSettings

    def find_truth(inner: Any) -> Truth:
        env = inner._env.unwrapped
        return MujocoTruth(env.model, env.data, "front", HIL_HAND, HIL_FINGERS)

    settings = {"cameras": ("front",), "image_size": SIZE, "person": ScriptSettings(after=40), "fast_render": True}
    return PluginPlayer("gym_hil", settings, [0.0] * 3 + [1.0], find_truth)


class TableTruth(Truth):
    """The scene of tabletop's first env, whose table is seen from above, x to the right and y upwards."""

    def __init__(self, state: Mapping[str, Any], image: Array) -> None:
        self._image = image
        self._state = {name: np.asarray(numbers[0]) for name, numbers in state.items()}

    def read_hand(self) -> tuple[Array, Array]:
        return np.append(self._state["gripper"], 0.0), np.array([1.0, 0.0, 0.0, 0.0])

    def read_opening(self) -> float:
        return float(not self._state["closed"])

    def read_numbers(self) -> Mapping[str, Array]:
        signs = {"closed -1 or 1": self._state["closed"], "holds a block -1 or 1": self._state["held"] >= 0}
        numbers = {name: np.array([1.0 if holds else -1.0]) for name, holds in signs.items()}
        return {"position x y": self._state["gripper"]} | numbers

    def read_things(self) -> Array:
        return np.pad(self._state["position"], ((0, 0), (0, 1)))

    def read_camera(self) -> str:
        return "above, all of the table" if self.compare_drawing(self._image)[0] == "" else "otherwise"

    def compare_drawing(self, image: Array) -> tuple[str, bool]:
        """Look for the blocks in their colours where a camera above the table sees them."""
        from vla_rl.plugins.envs.tabletop.render import COLOURS

        blocks = np.flatnonzero(~self._state["is_plate"])
        colours = np.array(COLOURS)[self._state["colour"][blocks]]
        columns, rows = ((1 + np.array([1, -1]) * self._state["position"][blocks]) / 2 * len(image)).astype(int).T
        gaps = {name: np.abs(undo(image)[rows, columns] - colours).mean() for name, undo in FLIPS.items()}
        return min(gaps, key=lambda name: gaps[name]), False


def open_tabletop_plugin() -> BatchPlayer:
    settings = {"tasks": ("pick_red",), "image_size": SIZE}
    choose_action = lambda player: np.asarray(player.env.expert_chunk()[0, 0])  # noqa: E731
    player = BatchPlayer("tabletop", settings, [0.0, 0.0, 1.0], None, choose_action)
    player._find_truth = lambda env: TableTruth(env._state, player.draw_image())
    return player


def open_libero_warp_plugin() -> BatchPlayer:
    def find_truth(env: Any) -> Truth:
        """Return C MuJoCo's data of the first env's world."""
        import mujoco

        number, world = env._place_of[0]
        batch = env._batches[number]
        numbers = {name: view[world].numpy() for name, view in batch._views.items() if name != "overflow"}
        model = copy(batch.task.model)
        model.body_pos[:], model.body_quat[:] = numbers["body_pos"], numbers["body_quat"]
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = numbers["qpos"], numbers["qvel"]
        mujoco.mj_forward(model, data)
        return MujocoTruth(model, data, "agentview", LIBERO_HAND, LIBERO_FINGERS)

    settings = {"suite": "libero_spatial", "tasks": (0,), "cameras": {"agentview": SIZE}}
    return BatchPlayer("libero_warp", settings, [0.0] * 6 + [-1.0], find_truth, put_bowl)


def put_bowl(player: Any) -> Array:
    """Return the action of the expert of `libero` in a world of `libero_warp`."""
    from vla_rl.plugins.envs.libero.expert import BOWL_TO_PLATE, Expert

    if not player.executed:
        player.script = Expert(BOWL_TO_PLATE)
    poses = {name: np.asarray(positions[0], np.float64) for name, positions in player.env.read_poses().items()}
    return np.asarray(player.script.choose_action(poses))


PACKAGES: dict[str, Callable[[], Player]] = {
    "libero": open_libero,
    "maniskill": open_maniskill,
    "metaworld": open_metaworld,
    "gym_hil": open_gym_hil,
}
PLUGINS: dict[str, Callable[[], PluginPlayer]] = {
    "libero": open_libero_plugin,
    "maniskill": open_maniskill_plugin,
    "metaworld": open_metaworld_plugin,
    "gym_hil": open_gym_hil_plugin,
    "libero_warp": open_libero_warp_plugin,
    "tabletop": open_tabletop_plugin,
}
