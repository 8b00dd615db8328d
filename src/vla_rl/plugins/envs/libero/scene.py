"""One LIBERO task in one simulator: exact resets, steps, images, and look-ahead without side effects. Imports MuJoCo,
so `MUJOCO_GL` is set before. robosuite draws from NumPy's global generator, and has no public names for what exact
resets and look-ahead need, hence the private ones below."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from functools import lru_cache
from io import StringIO
from types import SimpleNamespace

import numpy as np

from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.config import CAMERAS
from vla_rl.plugins.envs.libero.drawing import draw_on
from vla_rl.plugins.envs.libero.scene_changes import UNCHANGED, StartChanges
from vla_rl.plugins.envs.libero.suites import LiberoTask
from vla_rl.toolkit.envs.rendering import mujoco_error

os.environ.setdefault("MUJOCO_GL", "egl")


class _NoFile(logging.NullHandler):
    """What robosuite gets in place of its log file, /tmp/robosuite.log, which only a machine's first user may write."""

    def __init__(self, filename: str) -> None:
        super().__init__()


@contextmanager
def silence_packages() -> Iterator[None]:
    """Silence the packages imported below, which print progress, warn about a missing private settings file and open a
    log file."""
    disabled, to_file = logging.root.manager.disable, logging.FileHandler
    logging.disable(logging.WARNING)
    logging.FileHandler = _NoFile  # type: ignore[assignment, misc]
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.FileHandler = to_file  # type: ignore[misc]
        logging.disable(disabled)


try:
    with silence_packages():
        import mujoco
        import robosuite.environments.base as robosuite_base
        import robosuite.utils.transform_utils as transforms
        from libero.libero.envs.env_wrapper import ControlEnv
        from robosuite.utils.binding_utils import MjSim
        from robosuite.utils.errors import RandomizationError

        from vla_rl.plugins.envs.libero.compiled import CompiledModels, Sources, take_apart
        from vla_rl.plugins.envs.libero.drawing import CameraModel, Texture, load_textures
        from vla_rl.plugins.envs.libero.plus.camera import camera_pose
        from vla_rl.plugins.envs.libero.plus_models import register_changes
        from vla_rl.plugins.envs.libero.stepping import CHANGING, ControlLoop, SavedStep, SensorView
except (AttributeError, OSError, RuntimeError) as error:  # what PyOpenGL and MuJoCo raise without a library
    raise mujoco_error(error) from error

MOVED_CAMERA = CAMERAS["agentview"]
"""Camera that LIBERO-Plus moves."""
XYZW = [1, 2, 3, 0]
"""Index that reorders quaternions from MuJoCo's order (w first) to robosuite's (w last)."""
NO_MOTION = np.array([0.0] * 6 + [-1.0])
"""Action of the settling steps: stay, gripper open."""
CALM = 0.06
"""Most metres that an object may slide while a drawn scene settles; (almost all) official states stay below."""
REMEMBERED = 1000
"""Most episode starts per task that are cached instead of computed again; about 10 kB each."""
CACHE_BYTES = 8 * 2**30
"""Default size of the cache of compiled models on disk, in bytes."""
OTHER_BYTES = 30 * 2**20
"""Estimated memory of a scene's Python objects and two sets of simulation data, in bytes."""


@contextmanager
def seed_placements(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, from which placements are drawn, and restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


@contextmanager
def load_from_cache(compiled: CompiledModels) -> Iterator[list[Sources]]:
    """Make robosuite load compiled models from the cache instead of compiling them. The list that is yielded receives
    the scene's XML."""
    loaded: list[Sources] = []

    def load_simulator(xml: str) -> MjSim:
        loaded[:] = [take_apart(xml)]
        return MjSim(compiled.load_model(loaded[0].physics))

    robosuite_base.MjSim = SimpleNamespace(from_xml_string=load_simulator)
    try:
        yield loaded
    finally:
        robosuite_base.MjSim = MjSim


class LiberoScene:
    """Simulator of one task. Building it takes seconds, a reset milliseconds.

    Several env instances may take turns: `save` and `load` store and restore all that the future depends on.

    Args:
        cameras: name -> height and width in pixels.
        fast_render: no reflections, simplified meshes.
        fast_physics: one solver pass in each sub-step, see `stepping`.
        device: torch device on which the first scene of a process makes all scenes of the process draw.
        kept: cache of compiled models.
    """

    def __init__(
        self,
        task: LiberoTask,
        cameras: Mapping[str, int],
        fast_render: bool = False,
        fast_physics: bool = False,
        device: str = "cpu",
        compiled: CompiledModels | None = None,
    ) -> None:
        draw_on(device)
        self.task = task
        self._cameras = dict(cameras)
        compiled = compiled or CompiledModels(CACHE_BYTES)
        with (
            seed_placements(0),
            silence_packages(),
            load_from_cache(compiled) as loaded,
            register_changes(task.changes) as arguments,
        ):
            self._control = ControlEnv(
                bddl_file_name=task.bddl_file,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                hard_reset=False,
                ignore_done=True,
                **arguments,
            )
        self._env = self._control.env
        # The official reset loads the model again, which adds the samplers of drawers and knobs to the list once more.
        self._env.object_property_initializers *= 2
        self._robot = self._env.robots[0]
        self._model = self._env.sim.model._model
        self._data = self._env.sim.data._data
        self._joints = np.array(self._robot.init_qpos)
        self._camera_pose = self._loaded_camera()
        number = self._camera_pose[0]
        self._own_view = self._model.cam_pos[number].copy(), self._model.cam_quat[number].copy()
        self._fixtures = [self._loaded_pose(fixture.root_body) for fixture in self._env.fixtures_dict.values()]
        self._site_colours = self._model.site_rgba.copy()
        self._env.sim.reset = self._reset_simulator
        self._loop = ControlLoop(self._env, fast_physics)
        self._draw = lru_cache(REMEMBERED)(self._drawn)
        self._start = lru_cache(REMEMBERED)(self._started)
        self._camera = None
        self._rendered_model = self._model
        if cameras:
            [sources] = loaded
            self._rendered_model = compiled.load_model(sources.scene)
            if fast_render:
                self._rendered_model.mat_reflectance[:] = 0
            textures = load_textures(sources.texture_xmls, compiled)
            self._camera = CameraModel(self._rendered_model, textures, max(cameras.values()), fast_render)
        self._rendered_data = mujoco.MjData(self._rendered_model)
        self._state_of_data: SensorView | None = None

    @property
    def memory_bytes(self) -> int:
        """Estimated memory without textures: the model, its meshes as they are drawn, Python objects."""
        return 2 * int(mujoco.mj_sizeModel(self._rendered_model)) + OTHER_BYTES

    @property
    def textures(self) -> Sequence[Texture]:
        """Textures that this scene uses."""
        return () if self._camera is None else self._camera.textures

    # ------------------------------------------------------------------------------------------------ resets

    def _loaded_pose(self, body: str) -> tuple[int, Array, Array]:
        """Return number, position and orientation of a body as its model file gives them."""
        element = self._env.model.root.find(f".//body[@name='{body}']")
        position = np.array((element.get("pos") or "0 0 0").split(), np.float64)
        orientation = np.array((element.get("quat") or "1 0 0 0").split(), np.float64)
        return self._env.sim.model.body_name2id(body), position, orientation

    def _loaded_camera(self) -> tuple[int, Array, Array]:
        """Return number, position and orientation of the moved camera as its model file gives them, before MuJoCo
        normalises the orientation."""
        element = self._env.model.root.find(f".//camera[@name='{MOVED_CAMERA}']")
        position, orientation = (np.array(element.get(key).split(), np.float64) for key in ("pos", "quat"))
        return self._model.camera(MOVED_CAMERA).id, position, orientation

    def _look_from(self, view: tuple[int, ...] | None) -> None:
        """Move the camera as LIBERO-Plus's variant says, or put it back (None)."""
        number, position, orientation = self._camera_pose
        pose = self._own_view if view is None else camera_pose(position, orientation, view)
        self._model.cam_pos[number] = pose[0]
        self._model.cam_quat[number] = pose[1]

    def _reset_simulator(self) -> None:
        """Reset model and data to exactly what loading the model again would give. A reset that keeps the model leaves
        fixtures where the last episode had them and skips two forward passes, whose solver state would leak into the
        next episode. With both corrected every number of an episode equals that of the slow official reset."""
        for body, position, orientation in self._fixtures:
            self._model.body_pos[body] = position
            self._model.body_quat[body] = orientation
        self._model.site_rgba[:] = self._site_colours
        mujoco.mj_resetData(self._model, self._data)
        self._env.sim.forward()
        self._env.sim.forward()

    def calm_seed(self, seeds: Iterable[int]) -> int:
        """Return the first of these seeds whose scene is stable, else the one that comes closest. Raise ValueError for
        no seeds. The samplers sometimes place objects into or onto one another; these fly off, or come to rest where
        the task cannot be done. In a stable scene no object slides further than `CALM` while it settles."""
        moves: dict[int, float] = {}
        for seed in seeds:
            self.place(seed, None, 0)
            mujoco.mj_kinematics(self._model, self._data)
            before = self._things()
            for _ in range(10):
                self.step(NO_MOTION)
            moves[seed] = float(np.linalg.norm(self._things() - before, axis=1).max())
            if moves[seed] < CALM:
                break
        return min(moves, key=lambda seed: moves[seed])

    def distance(self, seed: int, states: Array) -> float:
        """Return the Euclidean distance, over the positions of all objects without the robot, from the placement of
        this seed to the nearest of these states (float64 [states, D], flattened simulator states)."""
        self.place(seed, None, 0)
        joints = len(self._robot._ref_joint_pos_indexes) + len(self._robot._ref_gripper_joint_pos_indexes)
        things = slice(1 + joints, 1 + self._model.nq)  # after the time and the robot
        placed = self.simulator_state()[things]
        return float(np.linalg.norm(states[:, things] - placed, axis=1).min())

    def _things(self) -> Array:
        """Return the positions of all movable objects on the table, float64 [objects, 2], in metres."""
        bodies = [self._env.obj_body_id[name] for name in self._env.objects_dict]
        return np.array(self._data.xpos[bodies, :2])

    def place(self, seed: int, state: Array | None, settle_steps: int, changes: StartChanges = UNCHANGED) -> None:
        """Start an episode: placements drawn with `seed`; then, if given, the robot and the movable objects as in
        `state` (float64, flattened simulator state); then settling steps. A repeated start comes from a cache and costs
        next to nothing."""
        flat = None if state is None else np.asarray(state, np.float64).tobytes()
        self._loop.load_step(self._start(seed, flat, settle_steps, changes))

    def _started(self, seed: int, state: bytes | None, settle_steps: int, changes: StartChanges) -> SavedStep:
        self._loop.load_step(self._draw(seed, changes.joints))
        self._look_from(changes.view)
        if state is not None:
            self._env.sim.set_state_from_flattened(np.frombuffer(state))
        if changes.keep_joints:
            self._data.qpos[self._robot._ref_joint_pos_indexes] = changes.joints
        self._env.sim.forward()
        self._env._check_success()
        self._env._post_process()
        self._loop.restart_control()
        for _ in range(settle_steps):
            self.step(NO_MOTION)
        return self._loop.save_step()

    def _drawn(self, seed: int, joints: tuple[float, ...] | None) -> SavedStep:
        """Run robosuite's own reset, which places the arm, and what the task does not fix."""
        self._robot.init_qpos = self._joints if joints is None else np.array(joints)
        with seed_placements(seed):
            while True:
                try:
                    self._env.reset()
                    break
                except RandomizationError:  # objects did not fit: draw again
                    continue
        return self._loop.save_step()

    def save(self) -> SavedStep:
        return self._loop.save_step()

    def load(self, saved: SavedStep) -> None:
        self._loop.load_step(saved)

    # ----------------------------------------------------------------------------------- steps and images

    def step(self, action: Array) -> tuple[float, bool]:
        """Apply one action, float64 [7]. Return reward and success."""
        reward, success = self._loop.step(action)
        return float(reward), bool(success)

    def _rendered_state(self) -> mujoco.MjData:
        """Return simulation data with the poses of all bodies as the official environment sees them now."""
        if self._state_of_data is not self._loop.seen:
            for name in CHANGING:
                getattr(self._rendered_model, name)[:] = getattr(self._model, name)
            self._rendered_data.qpos[:] = self._loop.seen.geometry
            for stage in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_camlight):
                stage(self._rendered_model, self._rendered_data)
            self._state_of_data = self._loop.seen
        return self._rendered_data

    @property
    def observation(self) -> dict[str, Array]:
        """Poses of hand, fingers and all movable objects, by their official names: `robot0_eef_pos`, `plate_1_quat`."""
        data, robot = self._rendered_state(), self._robot
        bodies = {f"{thing.name}_": self._env.obj_body_id[thing.name] for thing in self._env.objects}
        poses = {f"{name}pos": data.xpos[body].copy() for name, body in bodies.items()}
        poses |= {f"{name}quat": data.xquat[body, XYZW] for name, body in bodies.items()}
        poses["robot0_eef_pos"] = data.site_xpos[robot.eef_site_id].copy()
        poses["robot0_eef_quat"] = data.body(robot.robot_model.eef_name).xquat[XYZW]
        poses["robot0_gripper_qpos"] = self._loop.seen.positions[robot._ref_gripper_joint_pos_indexes]
        poses["robot0_joint_pos"] = self._loop.seen.positions[robot._ref_joint_pos_indexes]
        return poses

    def state(self) -> Array:
        """Return proprioception, float32 [8]: the hand's position [m], rotation vector [rad], two finger joints [m]."""
        obs = self.observation
        rotation = transforms.quat2axisangle(obs["robot0_eef_quat"])
        return np.concatenate([obs["robot0_eef_pos"], rotation, obs["robot0_gripper_qpos"]]).astype(np.float32)

    def images(self) -> dict[str, Array]:
        """Return the images of the current observation: camera -> uint8 [H, W, 3], rotated by 180 degrees."""
        if self._camera is None:
            return {}
        data = self._rendered_state()
        self._rendered_model.site_rgba[:] = self._loop.seen.colours
        return {
            name: self._camera.draw_image(data, CAMERAS[name], size)[::-1, ::-1] for name, size in self._cameras.items()
        }

    def simulator_state(self) -> Array:
        """Return time, positions and velocities, float64, flattened as in the official initial states."""
        return np.asarray(self._control.get_sim_state())

    def rehearsal(self) -> AbstractContextManager[None]:
        """Undo all steps made inside the context, to the last bit."""
        return self._loop.undo_steps()

    def close(self) -> None:
        """Free the memory. The scene cannot be used afterwards."""
        if self._camera is not None:
            self._camera.close()
        self._control.close()
        vars(self).clear()
        gc.collect()  # robosuite's objects form reference cycles
        with suppress(OSError, AttributeError):  # C libraries without malloc_trim
            ctypes.CDLL("libc.so.6").malloc_trim(0)
