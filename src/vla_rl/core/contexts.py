"""What core passes to a plugin's builder, `build(config, context)`: one small class a kind of plugin. Trainers get a
`vla_rl.toolkit.trainers.context.TrainerContext`; hooks and placement strategies get nothing. `check` of every kind gets
a `CheckContext`. Importing this module imports neither torch nor a simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import frozen

from vla_rl.core.types import EnvInfo, ValueGranularity

if TYPE_CHECKING:
    from vla_rl.core.hookspecs import VLAModel
    from vla_rl.core.world_models import WorldModel

Role = Literal["act", "learn", "both"]
"""What a worker does with its model."""
DataStatistics: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]
"""Statistics of actions and states, as `Demonstrations.data_statistics` returns them. Those of `relative_statistics`
also have "relative_to" of "action": what it was called with, -1 for None."""


@frozen(kw_only=True)
class Context:
    """What the components of all kinds get."""

    seed: int = 0
    device: str = "cpu"
    chunk: int = 1
    """C, actions in a chunk."""


@frozen(kw_only=True)
class CheckContext(Context):
    """What `check` of a plugin gets, before anything is built."""

    num_envs: int = 1
    """Simulators of the run."""
    suites: tuple[str, ...] = ()
    """Task suites of the simulator, where its settings name some."""
    temperature: float = 1.0
    """Sampling temperature."""
    scaling: DataStatistics | None = None
    """`ModelContext.scaling`, but empty: no data have been read yet."""


@frozen(kw_only=True)
class EnvContext(Context):
    """What a simulator gets."""

    num_envs: int = 1
    """Envs of this component (a run may have several components)."""
    first_env: int = 0
    """Run-wide number of the component's first env."""


@frozen(kw_only=True)
class PolicyContext(Context):
    """What models and engines both get."""

    env: EnvInfo
    """Simulator that the policy acts in."""
    suites: tuple[str, ...] = ()
    """Task suites of the simulator, where its settings name some."""
    temperature: float = 1.0
    """Sampling temperature, in rollout and training alike."""
    role: Role = "both"
    """What this process uses the model for. act: policy workers without a learner, `vla-rl eval` and `vla-rl serve`;
    learn: learners without a policy; both: workers with both, which share one set of weights."""


@frozen(kw_only=True)
class ModelContext(PolicyContext):
    """What a model gets."""

    values: ValueGranularity = "none"
    """Critic output that the algorithm needs: none, [B] or [B, C]."""
    scaling: DataStatistics | None = None
    """Statistics to normalise actions and state by, instead of the checkpoint's own, which may then be missing."""


@frozen(kw_only=True)
class EngineContext(PolicyContext):
    """What an engine gets."""

    model_config: Any = None
    """Settings of the spec's `model`, its plugin's `config`; None for engines that act with their own policy."""
    make_model: Callable[[], VLAModel] | None = None
    """Function that returns the run's wrapped model, built at the first call. None with `EnginePlugin.own_policy`."""


@frozen(kw_only=True)
class AlgorithmContext(Context):
    """What an algorithm gets."""


@frozen(kw_only=True)
class DataContext(Context):
    """What a reader of demonstrations gets."""

    env: EnvInfo
    """Simulator that the demonstrations are for."""


@frozen(kw_only=True)
class WorldModelContext(Context):
    """What a world model gets."""

    env: EnvInfo
    """Simulator whose episodes it predicts."""


@frozen(kw_only=True)
class RewardModelContext(Context):
    """What a reward model gets."""

    env: EnvInfo
    """Simulator, or robot, whose episodes it judges."""
    num_envs: int = 1
    """Envs that it judges at once."""


@frozen(kw_only=True)
class WorldModelTrainerContext(Context):
    """What the trainer of a world model gets."""

    world_model: WorldModel
    """World model, with its wrappers."""
