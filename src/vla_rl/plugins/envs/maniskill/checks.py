"""Checks of the settings of `maniskill` that need no running simulator."""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.spec.structure import at
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig, chosen_tasks
from vla_rl.plugins.envs.maniskill.tasks import INSTRUCTIONS, PANDA_ACTIONS, PANDA_TASKS
from vla_rl.toolkit.envs.vulkan import use_unpacked_driver

NAME_OF_A_TASK = re.compile(r"""["']([\w{}.-]+-v\d+)["']""")
WRIST_CAMERA = "panda_wristcam"
"""Robot: a Panda arm with a camera in its hand."""
SHOWN = 5
"""Most names that a message lists before it says how many more there are."""


def action_dim(config: ManiSkillConfig) -> int | None:
    """Return the number of action dimensions where the tasks are known to have one Panda arm, else None."""
    if config.robot in (None, "panda", WRIST_CAMERA) and all(task in PANDA_TASKS for task in chosen_tasks(config)):
        return PANDA_ACTIONS.get(config.control_mode)
    return None


def check_tasks(config: ManiSkillConfig, context: CheckContext) -> None:
    """Raise UserError for a task that ManiSkill does not have. What `imports` register is known once it is imported."""
    if config.imports:
        return
    for i, task in enumerate(chosen_tasks(config)):
        with at("tasks", i) if config.tasks else at("task"):
            if task not in INSTRUCTIONS and not any(fnmatchcase(task, name) for name in written_tasks()):
                raise unknown_task_error(task, written_tasks())


def written_tasks() -> list[str]:
    """Return the names of tasks in the package's source, with `*` for what it fills in, without importing SAPIEN."""
    (folder,) = find_spec("mani_skill").submodule_search_locations  # type: ignore[union-attr,misc]
    texts = (file.read_text(encoding="utf-8") for file in sorted(Path(folder, "envs").rglob("*.py")))
    return [re.sub(r"\{.*?\}", "*", name) for text in texts for name in NAME_OF_A_TASK.findall(text)]


def unknown_task_error(task: str, available: Iterable[str]) -> UserError:
    names = sorted(available)
    return UserError(f"no ManiSkill task {task!r}{did_you_mean(task, names)}\n  tasks: {', '.join(names)}")


def check_task(task: str, imports: Sequence[str] = ()) -> None:
    """Raise UserError for a task that does not exist, or lacks files. `imports`: modules that register tasks."""
    registry = registered_tasks(imports)
    if task not in registry:
        raise unknown_task_error(task, registry)
    groups = registry[task].asset_download_ids or ()
    missing = missing_assets(groups)
    if missing:
        from mani_skill import ASSET_DIR

        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise UserError(
            f"ManiSkill's {task} needs files that are not in {ASSET_DIR}: {', '.join(missing[:SHOWN])}{more}\n"
            f"  download them with: {'; '.join(map(download_command, groups))}\n"
            f"  or point MS_ASSET_DIR to the folder that holds data/"
        )


def registered_tasks(imports: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return task -> how ManiSkill registered it. Imports SAPIEN, and these modules, which register their own tasks.
    Raises UserError for one that cannot be imported."""
    use_unpacked_driver()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SAPIEN prints which Vulkan loader it uses
        from mani_skill import envs, logger  # noqa: F401 - the first registers tasks
        from mani_skill.utils import download_asset
        from mani_skill.utils.registration import REGISTERED_ENVS

    logger.setLevel(logging.ERROR)  # it warns authors of tasks whenever a scene is built
    download_asset.prompt_yes_no = refuse_download
    for module in imports:
        try:
            importlib.import_module(module)
        except ImportError as exc:
            raise UserError(f"maniskill: imports: {module!r} cannot be imported: {exc}") from exc
    result: Mapping[str, Any] = REGISTERED_ENVS
    return result


def missing_assets(groups: Iterable[str]) -> list[str]:
    """Return the data sources in these asset groups that are not on this machine."""
    from mani_skill.utils import assets

    sources: list[str] = []
    for group in groups:
        members = assets.expand_data_group_into_individual_data_source_ids
        sources += members(group) if group in assets.DATA_GROUPS else [group]
    return sorted({source for source in sources if not assets.is_data_source_downloaded(source)})


def download_command(name: str) -> str:
    """Return the command that downloads what a task or robot needs."""
    return f"python -m mani_skill.utils.download_asset {name} -y"


def refuse_download(question: str) -> bool:
    """Raise UserError instead of asking ManiSkill's question on the terminal, which might never be answered."""
    robot = question.split()[1] if question.startswith("Robot ") else "NAME"
    raise UserError(f"ManiSkill lacks files and asks: {question!r}\n  download them with: {download_command(robot)}")
