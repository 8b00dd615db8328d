"""`robotwin`: RoboTwin 2.0, tasks for two arms on SAPIEN. Light part; see docs/simulators/robotwin.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from attrs import converters, field, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.envs.robotwin import checks
from vla_rl.plugins.envs.robotwin.seeds import Seeds, absolute
from vla_rl.toolkit.envs.settings import Processes


@frozen(kw_only=True)
class RobotwinConfig:
    tasks: str | tuple[str, ...] = field(validator=checks.known_tasks)
    """Name of a task, or a list of names: beat_block_hammer, place_empty_cup, ..."""
    api: Literal["auto", "vector", "classic"] = "auto"
    """vector: `VectorEnv` of the runtime wheel or the branch RLinf_support, rows in threads and a chunk a call;
    classic: `setup_demo` and `take_action` of main or stable_2.0, rows in processes; auto: vector if it is there."""
    checkout: Path | None = field(default=None, converter=converters.optional(absolute))
    """Folder of a RoboTwin checkout to import; null: what the interpreter finds, such as the runtime wheel."""
    assets: Path | None = field(default=None, converter=converters.optional(absolute))
    """Folder with `assets/` in it; null: ROBOTWIN_ASSETS_ROOT, ASSETS_PATH or `checkout`, whichever is complete."""
    task_config: str | dict[str, Any] = field(default="demo_clean", converter=checks.task_config)
    """RoboTwin's task settings: a name (demo_clean, demo_randomized), a .yml file, or the settings themselves."""
    cameras: tuple[str, ...] = field(default=("head", "left_wrist", "right_wrist"), validator=checks.known_cameras)
    """In the order in which a model sees them. `task_config` sets their size: 240 x 320 with its D435."""
    seeds: Seeds = field(factory=Seeds)
    """Which scenes there are for training and evaluation, and what is done about those that do not work."""
    instruction_type: Literal["seen", "unseen"] = "seen"
    """Which of RoboTwin's wordings of a task are used."""
    planner: Literal["mplib", "curobo"] | None = None
    """vector API: who plans the expert's motions; null: as task_config says, else mplib."""
    processes: Processes = field(default=Processes(apart=True, deadline_s=900.0), validator=checks.processes_apart)
    """Processes of the classic API's rows; the vector API obeys `deadline_s` alone."""

    @property
    def rows_apart(self) -> bool:
        """Lanes of single rows need the rows in processes of `api: classic`."""
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
    action_dim=lambda config: checks.ACTION_DIM,
)
