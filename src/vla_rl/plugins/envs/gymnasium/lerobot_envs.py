"""lerobot's environments as ids of gymnasium: `lerobot/NAME` for a type of environment that lerobot knows by this name,
its own and those of `lerobot_env_*` distributions, and `lerobot/EnvHub` for a folder with an `env.py`."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvCreator
from gymnasium.vector import SyncVectorEnv

from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.gymnasium.config import LEROBOT

HUB = f"{LEROBOT}EnvHub"


def register_environments(env_id: str) -> None:
    """Register the ids of lerobot's environments. Raise UserError where `env_id` needs lerobot, and this interpreter
    lacks it."""
    if HUB not in gymnasium.registry:
        gymnasium.register(HUB, cast("EnvCreator", make_hub_environment))
    if env_id == HUB:
        return
    try:
        from lerobot.envs.configs import EnvConfig, HubEnvConfig
        from lerobot.utils.import_utils import register_third_party_plugins
    except ModuleNotFoundError as exc:
        raise UserError(
            f"{env_id} needs lerobot 0.6 or later, and {sys.executable} has no module {exc.name!r}; install it there, "
            "or name an interpreter that has it in env.python"
        ) from exc
    register_third_party_plugins()
    for name, config_class in EnvConfig.get_known_choices().items():
        if LEROBOT + name not in gymnasium.registry and not issubclass(config_class, HubEnvConfig):
            make = cast("EnvCreator", make_named_environment)
            gymnasium.register(LEROBOT + name, make, kwargs={"name": name})


def make_named_environment(name: str, render_mode: str | None = None, **settings: Any) -> gymnasium.Env[Any, Any]:
    """Return the environment of one of lerobot's types. Raise UserError for settings that the type does not have, and
    for those that make several environments.

    Args:
        settings: fields of the type's `EnvConfig`.
    """
    import draccus
    from lerobot.envs.configs import EnvConfig

    fields = [field.name for field in dataclasses.fields(EnvConfig.get_choice_class(name))]
    if unknown := sorted(settings.keys() - set(fields)):
        raise UserError(f"kwargs: {LEROBOT}{name} has no {', '.join(unknown)}; it has {', '.join(fields)}")
    if render_mode is not None and "render_mode" in fields:
        settings["render_mode"] = render_mode
    try:
        config = draccus.decode(EnvConfig, {"type": name, **settings})
    except draccus.utils.DraccusException as exc:
        raise UserError(f"kwargs: {LEROBOT}{name} cannot be made with {settings}: {exc}") from exc
    result = config.create_envs(n_envs=1, use_async_envs=False)
    return _select_environment(result, None, f"{LEROBOT}{name}", "give settings that leave one, such as task, task_ids")


def make_hub_environment(
    path: str, task: str | None = None, render_mode: str | None = None, **settings: Any
) -> gymnasium.Env[Any, Any]:
    """Return the environment of a folder whose `env.py` has lerobot's function `make_env`. Raise UserError without one,
    and for a task that it does not make.

    Args:
        path: the folder, or a Python file in it.
        task: SUITE/NUMBER of the environment, where `make_env` returns several.
        render_mode: not handed on, since `make_env` has no argument for it.
        settings: further arguments of `make_env`.
    """
    file = Path(path)
    file = file / "env.py" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"kwargs.path of {HUB}: {file} is not a file; give a folder with an env.py, or a Python file")
    name = f"lerobot_env_hub_{abs(hash(file.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the module of their fields
    spec.loader.exec_module(module)
    if not hasattr(module, "make_env"):
        raise UserError(f"kwargs.path of {HUB}: {file} has no function make_env(n_envs, use_async_envs)")
    result = module.make_env(n_envs=1, use_async_envs=False, **settings)
    return _select_environment(result, task, str(file), "choose one of them with kwargs.task")


def _select_environment(result: Any, task: str | None, maker: str, advice: str) -> gymnasium.Env[Any, Any]:
    """Return the single environment in what lerobot's makers return: an environment, a vector of one, or suite ->
    number of the task -> vector. `task`: SUITE/NUMBER; None: the only one. Close the others. Raise UserError."""
    suites = result if isinstance(result, Mapping) else {"": {0: result}}
    choices = {f"{suite}/{number}": env for suite, tasks in suites.items() for number, env in tasks.items()}
    names = list(choices) if task is None else [task]
    if len(names) != 1 or names[0] not in choices:
        for env in choices.values():
            env.close()
        difference = "" if task is None else f", none of them {task!r}"
        raise UserError(f"{maker} makes {len(choices)} environments{difference}: {', '.join(choices)}\n  {advice}")
    for name, env in choices.items():
        if name != names[0]:
            env.close()
    chosen = choices[names[0]]
    if isinstance(chosen, SyncVectorEnv):
        chosen = chosen.envs[0]
    if not isinstance(chosen, gymnasium.Env):
        raise UserError(f"{maker} makes {type(chosen).__name__}; one gymnasium.Env or SyncVectorEnv is needed")
    return chosen
