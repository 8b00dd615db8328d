"""Builds the RoboTwin simulator from the settings."""

from __future__ import annotations

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.plugins.envs.robotwin.classic import RobotwinEnv
from vla_rl.plugins.envs.robotwin.config import STATE_DIM, RobotwinConfig, camera_sizes
from vla_rl.plugins.envs.robotwin.installation import Installation, find_installation
from vla_rl.plugins.envs.robotwin.seeds import SPLITS, SeedBook
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS, task_names
from vla_rl.plugins.envs.robotwin.vector import VectorRobotwin
from vla_rl.toolkit.envs.single_env import env_factory
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs


def make_env(config: RobotwinConfig, context: EnvContext) -> SimEnv:
    """Return the simulator. Raise UserError when there is no RoboTwin, no assets, or when the settings ask for
    something that it does not have."""
    robotwin = find_installation(config)
    tasks = task_names(config.tasks)
    book = SeedBook(config.seeds, tasks)
    cameras = camera_sizes(config.cameras, robotwin.settings, config.image_height)
    action_low, action_high = robotwin.action_bounds()
    info = EnvInfo(
        cameras=cameras,
        state_dim=STATE_DIM,
        action_low=action_low,
        action_high=action_high,
        tasks=tuple(
            TaskInfo(
                name=task,
                instruction=robotwin.full_description(task),
                max_steps=STEP_LIMITS[task],
                instruction_varies=True,
            )
            for task in tasks
        ),
        notes=_list_notes(config, robotwin),
        chunk_is_one_motion=robotwin.api == "vector" and config.control == "joints",
    )
    if robotwin.api == "classic":
        states = {split: book.list_states(split) for split in SPLITS}
        return SubprocEnvs(info, states, env_factory(RobotwinEnv, robotwin, book), context, config.processes)
    if config.processes.recycle_episodes is not None or config.processes.recycle_mib is not None:
        raise UserError("processes.recycle_episodes and recycle_mib have no effect with RoboTwin's vector API")
    return VectorRobotwin(info, book, robotwin, context)


def _list_notes(config: RobotwinConfig, robotwin: Installation) -> tuple[str, ...]:
    named = config.task_config if isinstance(config.task_config, str) else "settings of the spec"
    notes = [f"RoboTwin's {robotwin.api} API, task_config: {named}, instructions: {robotwin.instruction_type}"]
    notes.append("images are ray-traced" if config.render == "ray" else "images are rasterised, not ray-traced")
    if not config.shadows:
        notes.append("images have no shadows")
    for split in SPLITS:
        file = getattr(config.seeds, split)
        source = f"from {file.name}" if file else f"from {100_000 * (1 + SPLITS.index(split))} on"
        notes.append(f"{split} seeds {source}")
    if config.seeds.check is False:
        notes.append("seeds.check: false: RoboTwin's expert may be unable to solve some scenes")
    if (robotwin.settings.get("domain_randomization") or {}).get("random_background"):
        notes.append("backgrounds of training are from RoboTwin's evaluation set too")
    return tuple(notes)
