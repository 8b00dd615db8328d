"""Creates a gymnasium environment from the settings, and refuses what cannot be trained on, with the reason.
Environments of lerobot have ids: `lerobot/NAME` for a type that it knows by this name, its own and those of
`lerobot_env_*` distributions, and `lerobot/EnvHub` for a folder with an `env.py`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import wrappers
from gymnasium.envs.registration import EnvCreator
from gymnasium.vector import SyncVectorEnv

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.spec.structure import at
from vla_rl.plugins.envs.gymnasium.config import LEROBOT, GymnasiumConfig, Wrapper
from vla_rl.plugins.envs.gymnasium.observations import uses_render

if sys.platform == "linux":  # before an environment imports mujoco or pygame; others ignore it
    os.environ.setdefault("MUJOCO_GL", "egl")
    if not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

Environment = gymnasium.Env[Any, Any]
HIDES_ENDS = "starts the next episode by itself, so ends would be missed"
REMEMBERS = "keeps statistics over episodes, so a state would not give the same episode again"
REFUSED = {
    wrappers.Autoreset: HIDES_ENDS,
    wrappers.NormalizeObservation: REMEMBERS,
    wrappers.NormalizeReward: REMEMBERS,
}


class Generators:
    """Private states of the global generators of NumPy and Python, for environments that draw from those: active inside
    `in_use`; afterwards the global generators are as before."""

    def __init__(self, seed: int) -> None:
        self._numpy = np.random.MT19937(seed % 2**32)
        self._python = random.Random(seed).getstate()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stub leaves it out
        python = random.getstate()
        numpy_state = np.random.get_state(legacy=False)
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]  # NumPy's stub leaves it out
        random.setstate(self._python)
        try:
            yield
        finally:
            self._python = random.getstate()
            random.setstate(python)
            np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]  # NumPy's stub leaves it out
            if numpy_state["has_gauss"]:  # a cached second normal number, which the exchange lost
                np.random.set_state(numpy_state)


def check_environment(config: GymnasiumConfig, context: CheckContext) -> None:
    """Raise UserError for an environment id or a wrapper that does not exist."""
    with at("imports"):
        import_all(config)
    with at("id"):
        check_registered(config.id)
    for i, wrapper in enumerate(config.wrappers):
        with at("wrappers", i, "name"):
            wrapper_class(wrapper)


def make_environment(config: GymnasiumConfig) -> Environment:
    """Return the environment in its wrappers. Raise UserError for what does not exist or cannot be used."""
    import_all(config)
    check_registered(config.id)
    from_render = uses_render(config)
    kwargs = ({"render_mode": "rgb_array"} if from_render else {}) | config.kwargs
    with Generators(0).in_use(), _translate_errors(config.id):
        env = gymnasium.make(config.id, max_episode_steps=config.max_steps, disable_env_checker=True, **kwargs)
        for wrapper in config.wrappers:
            make_wrapper = wrapper_class(wrapper)
            with _translate_errors(f"wrapper {wrapper.name}"):
                env = make_wrapper(env, **wrapper.kwargs)
    if config.fast_render:
        turn_effects_off_in(env, config.id)
    for layer in wrapper_layers(env):
        for kind, reason in REFUSED.items():
            if isinstance(layer, kind):
                raise UserError(f"{config.id} is wrapped in {kind.__name__}, which {reason}; leave it out")
    modes = env.metadata.get("render_modes") or []
    if from_render and not (env.render_mode == "rgb_array" and "rgb_array" in modes):
        raise UserError(
            f"images come from render mode 'rgb_array'; {config.id} was made with {env.render_mode!r} and has "
            f"{', '.join(map(str, modes)) or 'none'}\n  name images of its observation in cameras.NAME.source"
        )
    return env


def turn_effects_off_in(env: Environment, name: str) -> None:
    """Turn shadows, reflections and multisampling off in the environment's MuJoCo models, which it keeps itself or in a
    dm_control environment. Raise UserError where there is none."""
    mujoco = sys.modules.get("mujoco")
    models = [] if mujoco is None else list(_find_parts(env.unwrapped, mujoco.MjModel, depth=5))
    if not models:
        raise UserError(f"fast_render: {name} has no MuJoCo model when it is created; leave fast_render out")
    from vla_rl.toolkit.envs.meshes import turn_effects_off

    for model in models:
        turn_effects_off(model)


def _find_parts(owner: Any, kind: type, depth: int) -> Iterator[Any]:
    """Yield the objects of a class among the attributes of an object, and among theirs, up to a depth."""
    if isinstance(owner, kind):
        yield owner
    elif depth and not isinstance(owner, type | ModuleType):
        for part in getattr(owner, "__dict__", {}).values():
            yield from _find_parts(part, kind, depth - 1)


def import_all(config: GymnasiumConfig) -> None:
    """Import the modules that register environments. Raise UserError for one that cannot be imported, and for an id of
    lerobot without lerobot."""
    for module in config.imports:
        _import_module(module, "imports")
    if config.id.startswith(LEROBOT):
        register_environments(config.id)


def check_registered(name: str) -> None:
    """Raise UserError for an id that is not registered, or that stands for a vector environment."""
    with _translate_errors(name):
        try:
            spec = gymnasium.spec(name)
        except gymnasium.error.UnregisteredEnv as exc:
            known_ids = sorted(gymnasium.registry)
            raise UserError(
                f"no gymnasium environment {name!r}{did_you_mean(name, known_ids)}\n"
                f"  registered: {', '.join(known_ids)}\n"
                "  those of another package are registered when it is imported: name its module in imports"
            ) from exc
    if spec.entry_point is None:
        raise UserError(f"{name} is registered as a batch of environments; envs need single ones")


def step_limit(env: Environment, config: GymnasiumConfig) -> int:
    """Return the most steps of an episode. Raise UserError for an environment without a limit."""
    limits = [layer._max_episode_steps for layer in wrapper_layers(env) if isinstance(layer, wrappers.TimeLimit)]
    if not limits:
        raise UserError(f"{config.id} is registered without a step limit; give max_steps")
    return min(limits)


def wrapper_layers(env: Environment) -> Iterator[Environment]:
    """Yield the environment and everything that it wraps, outermost first."""
    yield env
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        yield env


def wrapper_class(wrapper: Wrapper) -> type[gymnasium.Wrapper[Any, Any, Any, Any]]:
    """Return the class of a wrapper. Raise UserError for a name that is not one."""
    if ":" in wrapper.name:
        module, _, name = wrapper.name.partition(":")
        kind = getattr(_import_module(module, "wrappers"), name, None)
        if kind is None:
            raise UserError(f"wrappers: module {module!r} has no {name!r}")
    else:
        known_wrappers = [name for name in wrappers.__all__ if name[0].isupper()]
        if wrapper.name not in known_wrappers:
            raise UserError(
                f"no wrapper {wrapper.name!r}{did_you_mean(wrapper.name, known_wrappers)}\n"
                f"  those of gymnasium: {', '.join(known_wrappers)}\n  name one of another module as module:Class"
            )
        kind = getattr(wrappers, wrapper.name)
    if not isinstance(kind, type) or not issubclass(kind, gymnasium.Wrapper):
        raise UserError(f"wrappers: {wrapper.name} is not a gymnasium.Wrapper")
    return kind


def _import_module(module: str, setting: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (module == exc.name or module.startswith(exc.name + ".")):
            raise UserError(f"{setting}: no module named {module!r}; install its package, or correct the name") from exc
        raise UserError(f"{setting}: module {module!r} needs {exc.name!r}, which is not installed") from exc


@contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    """Turn gymnasium's errors about a missing package, wrong arguments or an outdated id into UserErrors."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as exc:
        raise UserError(f"{what} needs a package that is not installed: {exc}") from exc
    except (ImportError, gymnasium.error.Error) as exc:
        raise UserError(f"{what} cannot be made: {exc}") from exc
    except (TypeError, ValueError, AssertionError) as exc:
        raise UserError(f"{what} cannot be made with these arguments: {type(exc).__name__}: {exc}") from exc


HUB = f"{LEROBOT}EnvHub"


def register_environments(env_id: str) -> None:
    """Register the ids of lerobot's environments. Raise UserError where `env_id` needs lerobot and it is missing."""
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
