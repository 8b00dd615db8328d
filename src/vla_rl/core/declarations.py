"""Declarations of plugins: the objects that entry points and `vla_rl_plugins` name. Cheap to import.

A declaration names what belongs to the plugin as entry points do, `module:attribute`. A target is imported where it is
first used, so that a plugin's `__init__.py` is cheap to import, and `vla-rl plugins` lists what is installed without
settings, models and simulators. A class or a function in place of a name works as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from vla_rl.core.errors import PluginError, did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

    from vla_rl.core.contexts import (
        AlgorithmContext,
        CheckContext,
        DataContext,
        EngineContext,
        EnvContext,
        ModelContext,
        RewardModelContext,
        WorldModelContext,
    )
    from vla_rl.core.hookspecs import Algorithm, Demonstrations, Placement, PolicyEngine, SimEnv, VLAModel
    from vla_rl.core.reward_models import RewardModel
    from vla_rl.core.trainers import Trainer
    from vla_rl.core.types import EnvInfo
    from vla_rl.core.world_models import WorldModel

T = TypeVar("T")
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""Form of a target's name: `package.module:attribute`."""


class Target(Generic[T]):
    """Attribute of a declaration that holds a class, a function or a mapping, given as such or by name. A name is
    resolved at the first access, which raises PluginError if the module has no such attribute; import errors pass
    through."""

    def __init__(self, *default: T) -> None:
        """`default`: none for an attribute that has to be given."""
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> T: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:  # where `dataclass` looks for a default
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        value = vars(instance)[self._name]
        if isinstance(value, str):
            value = vars(instance)[self._name] = resolve_target(value, f"{self._name} of {owner.__name__}")
        return value

    def __set__(self, instance: object, value: T | str) -> None:
        """Raise TypeError for what is neither callable, a mapping nor a name."""
        named = isinstance(value, str) and NAME.fullmatch(value)
        if not (named or callable(value) or isinstance(value, Mapping) or value in self._default):
            raise TypeError(
                f"{self._name}={value!r:.80} of {type(instance).__name__} is neither a class or function nor the name "
                f"of one; give its name as 'package.module:attribute'"
            )
        vars(instance)[self._name] = value


def resolve_target(name: str, what: str) -> Any:
    """Import and return the object of this name, `module:attribute`. Raise PluginError if the module has no such
    attribute. `what`: the name's place, for that message."""
    path, _, attribute = name.partition(":")
    module = import_module(path)
    try:
        return getattr(module, attribute)
    except AttributeError as exc:
        near = did_you_mean(attribute, vars(module))
        raise PluginError(f"{what} names {name!r}, and module {path} has no {attribute!r}{near}") from exc


class TrainingData(Enum):
    """Kind of data that a trainer learns from."""

    TRAJECTORIES = "trajectories"
    """Samples of the step's whole trajectories, with advantages: `TrajectoryData`."""
    DEMONSTRATIONS = "demonstrations"
    """Samples of demonstrations: `DemonstrationsData`."""
    RECORDINGS = "recordings with rewards"
    """Samples of recorded episodes, good and bad, with their rewards: `DemonstrationsData`."""
    TRANSITIONS = "transitions"
    """Transitions with their next observations, which the trainer keeps: `TransitionsData`."""
    WINDOWS = "windows"
    """Windows of recorded episodes, for a world model: `WindowData`."""


@dataclass(kw_only=True, repr=False, eq=False)  # no repr and eq: they would import the targets
class Declaration:
    """Attributes that the declarations of all kinds have."""

    config: Target[type] = Target()
    """attrs class (frozen, kw_only) of the plugin's keys in a spec, or its name."""
    summary: str
    """What the plugin is, in one line."""
    extra: str | None = None
    """Extra of the distribution that installs what `build` imports."""
    presets: Target[Mapping[str, Mapping[str, Any]] | None] = Target(None)
    """Named sets of keys: `preset: NAME` in a spec stands for them, and keys given with it take precedence. No key may
    be named `preset`."""
    check: Target[Callable[[Any, CheckContext], None] | None] = Target(None)
    """Function of (config, context), called by `vla-rl check` and before every run; takes less than a
    second. Raises UserError for problems that are visible without building: missing or truncated files, unknown names,
    a chunk length that the checkpoint was not trained for. `vla_rl.at(key)` names the key to blame. No downloads."""


@dataclass(kw_only=True, repr=False, eq=False)
class ModelPlugin(Declaration):
    """Declaration of a model."""

    build: Target[Callable[[Any, ModelContext], VLAModel]] = Target()
    """Class or function (config, context) -> `VLAModel`."""
    action_dim: Target[Callable[[Any], int | None] | None] = Target(None)
    """Function of the config that returns the action dimension, or None if it is unknown without building. Env and
    model must agree."""
    default_chunk: Target[Callable[[Any], int | None] | None] = Target(None)
    """Function of the config that returns how many actions of a chunk the checkpoint's files say are executed, the
    default of `rollout.chunk`; a spec with another number is warned. None: they do not say."""
    relative_actions: Target[Callable[[Any, EnvInfo], Sequence[int | None]] | None] = Target(None)
    """Function of (config, simulator) that returns the place of the state's number that each number of the network's
    actions is relative to, None for absolute ones; empty: all are absolute. `imitation.statistics: data` asks it, to
    measure the differences."""
    no_rl: Target[Callable[[Any], str | None] | None] = Target(None)
    """Function of the config that returns why RL is impossible with it, called before a run; None: it is possible."""


@dataclass(kw_only=True, repr=False, eq=False)
class EnvPlugin(Declaration):
    """Declaration of a simulator."""

    build: Target[Callable[[Any, EnvContext], SimEnv]] = Target()
    """Class or function (config, context) -> `SimEnv`."""
    preflight: Target[Callable[[Any], None] | None] = Target(None)
    """Function of the config, called before any process starts. Raises UserError for missing drivers, assets."""
    lacks: Target[Callable[[], str | None] | None] = Target(None)
    """Function that returns what the interpreter lacks beyond those of `extra`, for `vla-rl plugins`; None: nothing."""
    env_info: Target[Callable[[Any], EnvInfo] | None] = Target(None)
    """Function of the config that returns the description without building anything. Optional; with it `vla-rl check`
    and `plan` predict the memory of GPUs."""
    action_dim: Target[Callable[[Any], int | None] | None] = Target(None)
    """Function of the config that returns the action dimension, or None if it is unknown without building. Env and
    model must agree."""
    env_memory: int = 0
    """Host memory of one env in bytes, if it is not negligible."""
    expert: bool = False
    """There is a scripted expert (`SimEnv.expert_chunk`), at least for some of the tasks."""


@dataclass(kw_only=True, repr=False, eq=False)
class AlgorithmPlugin(Declaration):
    """Declaration of an algorithm."""

    build: Target[Callable[[Any, AlgorithmContext], Algorithm]] = Target()
    """Class or function (config, context) -> `Algorithm`."""
    preflight: Target[Callable[[Any], None] | None] = Target(None)
    """Function of the config, called before any process starts. Raises UserError for what is missing, such as files."""


@dataclass(kw_only=True, repr=False, eq=False)
class TrainerPlugin(Declaration):
    """Declaration of a trainer."""

    build: Target[Callable[..., Trainer[Any]]] = Target()
    """Class or function (config, context) -> `Trainer`. The context is a `TrainerContext`, and a
    `WorldModelTrainerContext` for the trainer of a world model."""
    trains_on: TrainingData
    """Kind of data that the trainer learns from."""
    expert_share: Target[Callable[[Any, int], float] | None] = Target(None)
    """Trainers of transitions: function of (config, training step from 1): the probability that the simulator's expert
    acts in a chunk instead of the policy; chunks are `Transitions.expert_actions`. None: the expert is not asked."""
    instruction_suffix: str = ""
    """`VLAModel.instruction_suffix` of the trainer's policy when it acts."""


@dataclass(kw_only=True, repr=False, eq=False)
class PlacementPlugin(Declaration):
    """Declaration of a placement strategy."""

    build: Target[Callable[[Any], Placement]] = Target()
    """Class or function (config) -> `Placement`."""


@dataclass(kw_only=True, repr=False, eq=False)
class EnginePlugin(Declaration):
    """Declaration of an engine, which runs a policy."""

    build: Target[Callable[[Any, EngineContext], PolicyEngine]] = Target()
    """Class or function (config, context) -> `PolicyEngine`."""
    own_policy: bool = False
    """It acts with its own policy, such as that of a server. The spec's `model` is not built, and `run` and `sft`
    refuse it. False: it acts with the weights of the spec's model, which `PolicyEngine.load` receives."""


@dataclass(kw_only=True, repr=False, eq=False)
class DataPlugin(Declaration):
    """Declaration of a reader of data sets."""

    build: Target[Callable[[Any, DataContext], Demonstrations]] = Target()
    """Class or function (config, context) -> `Demonstrations`."""
    inspect: Target[Callable[[Path], Any] | None] = Target(None)
    """Function (folder) -> `vla_rl.toolkit.data.inspection.recorded.RecordedData`, for `vla-rl data`."""
    files: tuple[str, ...] = ()
    """Patterns of files, as `Path.glob` reads them, by which `vla-rl data` knows a folder of this format."""


@dataclass(kw_only=True, repr=False, eq=False)
class WorldModelPlugin(Declaration):
    """Declaration of a world model."""

    build: Target[Callable[[Any, WorldModelContext], WorldModel]] = Target()
    """Class or function (config, context) -> `WorldModel`."""


@dataclass(kw_only=True, repr=False, eq=False)
class RewardModelPlugin(Declaration):
    """Declaration of a reward model."""

    build: Target[Callable[[Any, RewardModelContext], RewardModel]] = Target()
    """Class or function (config, context) -> `RewardModel`."""


@dataclass(kw_only=True, repr=False, eq=False)
class HookPlugin(Declaration):
    """Declaration of a hook."""

    build: Target[Callable[[Any], Any]] = Target()
    """Class or function (config) -> an object with `RunEvents` methods, or with wrappers."""
    files: Target[Callable[[Any], Iterable[str]] | None] = Target(None)
    """Function of the config that returns the names of the files and folders the hook writes in the run folder. Neither
    another hook nor the run may write them."""
