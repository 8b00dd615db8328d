"""Changes of RoboTwin's runtime in the process that it is loaded in, each for a reason that no setting of RoboTwin
covers. Its prints and its seeding of the global generators are kept away from the rest of the process."""

from __future__ import annotations

import ctypes
import importlib
import io
import random
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from vla_rl.plugins.envs.robotwin.config import RobotwinConfig, scale_size
from vla_rl.toolkit.envs.vulkan import use_unpacked_driver

LOG_NONE = 6
"""`ompl::msg::LOG_NONE` (OMPL 1.6)."""
SET_LOG_LEVEL = "_ZN4ompl3msg11setLogLevelENS0_8LogLevelE"
"""Symbol of `ompl::msg::setLogLevel(LogLevel)`."""
UNUSED_PACKAGE = "open3d"
"""Imported by RoboTwin's camera module for point clouds, which are never asked for here; 400 MB."""


def prepare_modules(package: str, config: RobotwinConfig) -> None:
    """Load RoboTwin's base modules quietly, and change what has to be changed. Safe to call again.

    Args:
        package: of the tasks, "robotwin.envs" or "envs".
        config: its `render`, `shadows` and `image_height`, for which RoboTwin has no settings.
    """
    if UNUSED_PACKAGE not in sys.modules and find_spec(UNUSED_PACKAGE) is None:
        sys.modules[UNUSED_PACKAGE] = module_from_spec(ModuleSpec(UNUSED_PACKAGE, None))
    if config.render == "raster":
        use_rasteriser()
    with (
        suppress_prints(),
        redirect_stderr(NullStream()),
    ):  # without cuRobo its import prints a traceback
        planner = importlib.import_module(f"{package}.robot.planner")
        base = importlib.import_module(f"{package}._base_task")
        camera = importlib.import_module(f"{package}.camera.camera")
    set_shadows(base, config.shadows)
    set_image_height(camera, config.image_height)
    plan_with_all_joints(planner)
    silence_planner()


def use_rasteriser() -> None:
    """Make SAPIEN draw with its rasteriser wherever RoboTwin asks for ray tracing (`_base_task.setup_scene`), which a
    CPU's Vulkan driver cannot do."""
    use_unpacked_driver()
    render: Any = importlib.import_module("sapien.render")
    if getattr(render.set_camera_shader_dir, "rasterises", False):
        return
    original: Callable[[str], None] = render.set_camera_shader_dir

    @wraps(original)
    def set_camera_shader_dir(name: str) -> None:
        original("default" if name == "rt" else name)

    vars(set_camera_shader_dir)["rasterises"] = True
    render.set_camera_shader_dir = set_camera_shader_dir
    for setting in ("samples_per_pixel", "path_depth", "denoiser"):
        setattr(render, f"set_ray_tracing_{setting}", lambda value: None)


def set_shadows(base: ModuleType, shadows: bool) -> None:
    """Make lights cast shadows or none. RoboTwin's `setup_scene` has the argument, which none of its callers give."""
    task = base.Base_Task
    original = vars(task).get("setup_scene_with_shadow") or task.setup_scene
    task.setup_scene_with_shadow = original

    @wraps(original)
    def setup_scene(self: Any, **kwargs: Any) -> None:
        original(self, **{"shadow": shadows} | kwargs)

    task.setup_scene = setup_scene


def set_image_height(module: ModuleType, image_height: int | None) -> None:
    """Make cameras draw images of this height, with their aspect and angle of view; None: their own size."""
    camera = module.Camera
    original = vars(camera).get("load_camera_in_size") or camera.load_camera
    camera.load_camera_in_size = original

    @wraps(original)
    def load_camera(self: Any, scene: Any) -> None:
        add_camera = scene.add_camera

        def add_scaled(*, height: int, width: int, **kwargs: Any) -> Any:
            height, width = scale_size((height, width), image_height)
            return add_camera(height=height, width=width, **kwargs)

        scene.add_camera = add_scaled
        try:
            original(self, scene)
        finally:
            del scene.add_camera

    camera.load_camera = load_camera


def plan_with_all_joints(planner: ModuleType) -> None:
    """Hand mplib the positions of all joints of the articulation instead of the arm's six.

    mplib 0.2.1 writes six given positions into the first six joints of the articulation, in SAPIEN's order of depth.
    Where both arms are one articulation, these are joints of both arms, and plans start from a wrong posture: on
    stack_blocks_two the expert then solves 0 of 4 scenes, and 3 of 3 with all joints.
    """
    wrapper = getattr(planner, "MplibWrapperPlanner", None)
    if wrapper is None or getattr(wrapper, "plans_with_all_joints", False):
        return
    original = wrapper.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the method that it replaces
        original(self, *args, **kwargs)
        self.active_joints_name = self.all_joints  # read by nothing but the choice of positions

    wrapper.__init__ = __init__
    wrapper.plans_with_all_joints = True


def silence_planner() -> None:
    """Turn off the messages of mplib's OMPL, which go to the terminal from C++: a seed that the expert cannot solve
    costs hundreds of lines. Without effect for a build of mplib that does not export the function."""
    mplib = sys.modules.get("mplib")
    if mplib is None or mplib.__file__ is None:
        return
    folder = Path(mplib.__file__).parent
    for library in sorted([*folder.glob("pymp*.so"), *folder.with_name("mplib.libs").glob("libompl*")]):
        set_level = getattr(ctypes.CDLL(str(library)), SET_LOG_LEVEL, None)
        if set_level is not None:
            set_level(LOG_NONE)


_lock = threading.RLock()


class NullStream(io.TextIOBase):
    """Text stream that drops what is written."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def suppress_prints() -> Generator[None]:
    """Suppress prints of all threads of the process inside the context; one calling thread at a time."""
    with _lock, redirect_stdout(NullStream()):
        yield


@contextmanager
def kept_randomness() -> Generator[None]:
    """Restore the global generators of Python, NumPy and torch (where that is loaded) after the context."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state() if torch is not None else None
    cuda_states = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)
            if cuda_states is not None:
                torch.cuda.set_rng_state_all(cuda_states)
