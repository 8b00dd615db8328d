"""Creates a gymnasium environment from the settings, and refuses what cannot be trained on, with the reason."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from attrs import frozen
from gymnasium import spaces, wrappers

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.types import Array
from vla_rl.plugins.envs.gymnasium import GymnasiumConfig
from vla_rl.plugins.envs.gymnasium.settings import Wrapper

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


@frozen(kw_only=True)
class Facts:
    """Properties of an environment that its spaces and wrappers determine."""

    state_dim: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    max_steps: int


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


def make(config: GymnasiumConfig) -> Environment:
    """Return the environment in its wrappers. Raise UserError for what does not exist or cannot be used."""
    import_all(config)
    check_registered(config.id)
    renders = config.camera.source == "render"
    kwargs = ({"render_mode": "rgb_array"} if renders else {}) | config.kwargs
    with Generators(0).in_use(), _readable(config.id):
        env = gymnasium.make(config.id, max_episode_steps=config.max_steps, disable_env_checker=True, **kwargs)
        for wrapper in config.wrappers:
            env = _wrapped(env, wrapper)
    for layer in wrapper_layers(env):
        for kind, reason in REFUSED.items():
            if isinstance(layer, kind):
                raise UserError(f"{config.id} is wrapped in {kind.__name__}, which {reason}; leave it out")
    modes = env.metadata.get("render_modes") or []
    if renders and not (env.render_mode == "rgb_array" and "rgb_array" in modes):
        raise UserError(
            f"pictures come from render mode 'rgb_array'; {config.id} was made with {env.render_mode!r} and has "
            f"{', '.join(map(str, modes)) or 'none'}\n  if its observation holds a picture, name it in camera.source"
        )
    return env


def import_all(config: GymnasiumConfig) -> None:
    """Import the modules that register environments. Raise UserError for one that cannot be imported."""
    for module in config.imports:
        _import(module, "imports")


def check_registered(name: str) -> None:
    """Raise UserError for an id that is not registered, or that stands for a vector environment."""
    with _readable(name):
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


def read_facts(env: Environment, config: GymnasiumConfig) -> Facts:
    """Return what the spaces and wrappers say, without a step. Raise UserError where they do not suit."""
    low, high = _bounds(env.action_space, config)
    limits = [layer._max_episode_steps for layer in wrapper_layers(env) if isinstance(layer, wrappers.TimeLimit)]
    if not limits:
        raise UserError(f"{config.id} is registered without a step limit; give max_steps")
    if config.camera.source != "render":
        space = _chosen(env.observation_space, config.camera.source, "camera.source", config.id)
        if not (isinstance(space, spaces.Box) and _is_picture(space.dtype, space.shape)):
            raise UserError(f"camera.source {config.camera.source!r} of {config.id} is {space}, {NO_PICTURE}")
    state_dim = 0
    if config.state is not None:
        space = _chosen(env.observation_space, config.state, "state", config.id)
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise UserError(f"state {config.state!r} of {config.id} is {space}; a state is a Box of one dimension")
        state_dim = space.shape[0]
    return Facts(state_dim=state_dim, low=low, high=high, max_steps=min(limits))


def wrapper_layers(env: Environment) -> Iterator[Environment]:
    """Yield the environment and everything that it wraps, outermost first."""
    yield env
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        yield env


def observation_entry(observation: Any, name: str) -> Array:
    """Return an entry of a dict observation, or the whole observation if it is no dict."""
    return np.asarray(observation[name] if isinstance(observation, dict) else observation)


NO_PICTURE = "not a picture: uint8 [height, width, 3]"


def checked_picture(image: Any, what: str) -> Array:
    """Return the image if it is a uint8 RGB array. Raise UserError otherwise."""
    if not isinstance(image, np.ndarray) or not _is_picture(image.dtype, image.shape):
        description = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise UserError(f"{what} gave {description}, {NO_PICTURE}")
    return image


# ------------------------------------------------------------------------------------------------- inside


def _is_picture(dtype: Any, shape: Sequence[int]) -> bool:
    return dtype == np.uint8 and len(shape) == 3 and shape[-1] == 3


def _bounds(space: Any, config: GymnasiumConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
        raise UserError(
            f"{config.id} takes actions of {space}, and a model here gives vectors of continuous numbers: the action "
            "space must be a Box of floats with one dimension\n"
            "  choose another environment (MountainCarContinuous-v0 instead of CartPole-v1), or add a wrapper that "
            "converts"
        )
    if config.action_low is None or config.action_high is None:
        if not space.is_bounded():
            raise UserError(
                f"{config.id} takes actions without bounds, {space}; say within which ones to act: action_low and "
                f"action_high, {space.shape[0]} numbers each"
            )
        return tuple(space.low.tolist()), tuple(space.high.tolist())
    low, high = config.action_low, config.action_high
    if len(low) != space.shape[0]:
        raise UserError(f"action_low has {len(low)} numbers, and {config.id} takes actions of {space.shape[0]}")
    if (np.array(low) < space.low - 1e-6).any() or (np.array(high) > space.high + 1e-6).any():
        raise UserError(
            f"action_low {list(low)} and action_high {list(high)} reach beyond what {config.id} takes: {space}"
        )
    return low, high


def _chosen(space: Any, name: str, setting: str, env_id: str) -> Any:
    if isinstance(space, spaces.Dict):
        if name not in space.spaces:
            keys = list(space.spaces)
            near = did_you_mean(name, keys)
            raise UserError(f"{setting}: {env_id} observes no {name!r}{near}\n  keys: {', '.join(keys)}")
        return space[name]
    if name != "observation":
        raise UserError(
            f"{setting}: {env_id} observes {space}, without keys such as {name!r}; give `observation` for all of it"
        )
    return space


def wrapper_class(wrapper: Wrapper) -> type[gymnasium.Wrapper[Any, Any, Any, Any]]:
    """Return the class of a wrapper. Raise UserError for a name that is not one."""
    if ":" in wrapper.name:
        module, _, name = wrapper.name.partition(":")
        kind = getattr(_import(module, "wrappers"), name, None)
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


def _wrapped(env: Environment, wrapper: Wrapper) -> Environment:
    kind = wrapper_class(wrapper)
    with _readable(f"wrapper {wrapper.name}"):
        return kind(env, **wrapper.kwargs)


def _import(module: str, setting: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (module == exc.name or module.startswith(exc.name + ".")):
            raise UserError(f"{setting}: no module named {module!r}; install its package, or correct the name") from exc
        raise UserError(f"{setting}: module {module!r} needs {exc.name!r}, which is not installed") from exc


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn gymnasium's errors about a missing package, wrong arguments or an outdated id into UserErrors."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as exc:
        raise UserError(f"{what} needs a package that is not installed: {exc}") from exc
    except (ImportError, gymnasium.error.Error) as exc:
        raise UserError(f"{what} cannot be made: {exc}") from exc
    except (TypeError, ValueError, AssertionError) as exc:
        raise UserError(f"{what} cannot be made with these arguments: {type(exc).__name__}: {exc}") from exc
