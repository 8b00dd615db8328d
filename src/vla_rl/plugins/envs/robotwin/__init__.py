"""`robotwin`: RoboTwin 2.0, two-arm tasks on SAPIEN. Settings only, light to import; see
docs/simulators/robotwin.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from attrs import converters, field, frozen
from attrs import validators as v

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.envs.robotwin import checks
from vla_rl.plugins.envs.robotwin.seeds import Seeds, absolute
from vla_rl.toolkit.envs.settings import Processes


@frozen(kw_only=True)
class RobotwinConfig:
    """Spec keys of the simulator `robotwin`."""

    tasks: str | tuple[str, ...] = field(validator=checks.known_tasks)
    """Task name, or a list of names: beat_block_hammer, place_empty_cup, ..."""
    api: Literal["auto", "vector", "classic"] = "auto"
    """API of RoboTwin. `vector`: `VectorEnv` of the runtime wheel or the branch RLinf_support, one thread per env and
    one call per chunk; `classic`: `setup_demo` and `take_action` of main or stable_2.0, envs in processes; `auto`:
    vector if available."""
    checkout: Path | None = field(default=None, converter=converters.optional(absolute))
    """Folder of a RoboTwin checkout to import; null: what the interpreter finds, such as the runtime wheel."""
    assets: Path | None = field(default=None, converter=converters.optional(absolute))
    """Folder that contains `assets/`; null: ROBOTWIN_ASSETS_ROOT, ASSETS_PATH or `checkout`, whichever is complete."""
    task_config: str | dict[str, Any] = field(default="demo_clean", converter=checks.task_config)
    """RoboTwin's task settings: a name (demo_clean, demo_randomized), a .yml file, or the settings themselves."""
    cameras: tuple[str, ...] = field(default=("head", "left_wrist", "right_wrist"), validator=checks.known_cameras)
    """Cameras, in the order in which a model sees them. `task_config` sets their size: 240 x 320 with its D435."""
    image_height: int | None = field(default=None, validator=v.optional([v.ge(16), v.le(1080)]))
    """Height of images in pixels, 16 to 1080, with the camera's aspect and angle of view; null: the camera's own. Small
    images save a CPU most of a step."""
    render: Literal["ray", "raster"] = "ray"
    """Renderer. `ray`: RoboTwin's ray tracing, which needs an NVIDIA GPU; `raster`: SAPIEN's rasteriser, which also
    runs on a CPU. Images differ, so a policy needs the one that it was trained with."""
    shadows: bool = True
    """Draw shadows. Without them a CPU takes a quarter of the time for an image, and pixels differ."""
    control: Literal["joints", "end_effector"] = "joints"
    """Action. `joints`: 14 joint targets; `end_effector`: 16 numbers, for each arm position [m] and quaternion
    (w, x, y, z) of the hand in the world, and the gripper; a motion is planned to each."""
    seeds: Seeds = field(factory=Seeds)
    """Scenes of training and evaluation, and the treatment of seeds that do not work."""
    instruction_type: Literal["seen", "unseen"] = "seen"
    """Set of RoboTwin's wordings of a task from which instructions are taken."""
    planner: Literal["mplib", "curobo"] | None = None
    """Motion planner of the expert, with the vector API; null: as task_config says, else mplib."""
    processes: Processes = field(default=Processes(apart=True, deadline_s=900.0), validator=checks.processes_apart)
    """Processes of the classic API's env instances; the vector API uses `deadline_s` alone."""

    @property
    def independent_envs(self) -> bool:
        """Whether env instances can step one by one (lanes of single envs): it needs `api: classic`, whose instances
        are in processes."""
        return self.api == "classic"


def build(config: RobotwinConfig, context: Context) -> Any:
    from vla_rl.plugins.envs.robotwin.env import make_env

    return make_env(config, context)


plugin = Plugin(
    config=RobotwinConfig,
    build=build,
    summary="RoboTwin 2.0: 50 tasks for two arms, SAPIEN; in an interpreter of its own (env.python)",
    preflight=checks.preflight,
    check=checks.check,
    lacks=checks.lacks,
    action_dim=lambda config: checks.ACTION_DIMS[config.control],
    expert=True,
)
