"""A simulator with one scene: a plugin writes a `SingleEnv`; `SubprocEnvs` (`subproc_envs.py`) makes N a `SimEnv`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.fields import arrange_fields, shape_of
from vla_rl.core.samples import result_fields
from vla_rl.core.types import ActionSource, Array, ChunkResult, EnvInfo, Observation, at_last_action


class Outcome(NamedTuple):
    """Result of one action."""

    reward: float
    success: bool
    terminated: bool
    truncated: bool = False
    source: ActionSource = ActionSource.POLICY
    """Who chose the action that was executed; another source than the policy needs `EnvInfo.takeovers`."""
    executed_action: Array | None = None
    """The action that was executed instead of the policy's, float32 [A]; given with another source."""
    late: bool = False
    """The action began later than it was due (`EnvInfo.control_hz`)."""
    extras: Mapping[str, Any] = MappingProxyType({})
    """Further numbers, as `EnvInfo.extras` declares them: a float for "C", an array [3] for "C 3"."""


ATTRIBUTES = {
    "rewards": "reward",
    "succeeded": "success",
    "terminated": "terminated",
    "truncated": "truncated",
    "source": "source",
    "late": "late",
}
"""Field of a chunk step -> the attribute of an `Outcome` that it is made of."""


class View(NamedTuple):
    """Observation of one env."""

    images: Mapping[str, Array]
    """Images by camera, uint8 [H, W, 3], upright."""
    state: Array | None = None
    """Proprioceptive state, float32 [S]."""
    instruction: str | None = None
    """Instruction of the episode; None: the task's."""


class SingleEnv(ABC):
    """A simulator with one scene, created in the process it lives in. It may build its scene in the first reset."""

    @abstractmethod
    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode from this state; `seed` keys everything else that is random in it."""

    @abstractmethod
    def step(self, action: Array) -> Outcome:
        """Apply one action, float32 [A]."""

    @abstractmethod
    def render(self) -> View:
        """Render the current observation. Called only after a reset and at the end of a chunk."""

    def expert_chunk(self, length: int) -> Array:
        """Return a scripted expert's next actions, float32 [length, A], without changing the simulator. Optional."""
        raise UserError(f"{type(self).__name__} has no scripted expert")

    def close(self) -> None:  # noqa: B027 - optional
        """Free GL contexts and the like."""


def empty_records(info: EnvInfo, *shape: int) -> Array:
    """Return records of actions of which none is executed yet: a structured array of this shape, with a field for
    everything that an action reports (`fields.result_fields`). One array crosses processes faster than one a field."""
    for name, dims in info.extras.items():
        if not dims.startswith("C"):
            raise ValueError(
                f"extras: {name!r} has dimensions {dims!r}; an `Outcome` has numbers of one action: 'C ...'"
            )
    sizes = {"A": info.action_dim}
    of_actions = [field for field in result_fields(info) if field.dims.startswith("N C")]
    return np.zeros(shape, [(one.name, one.dtype, shape_of(one.dims.split()[2:], sizes)) for one in of_actions])


def execute_chunk(records: Array, actions: Array, step: Callable[[Array], Outcome], stop_at_end: bool) -> None:
    """Execute a chunk, float32 [C, A], by `step`, up to an episode's end if `stop_at_end`, and fill records [C]."""
    outcomes: list[Outcome] = []
    for action in actions:
        outcomes.append(outcome := step(action))
        if stop_at_end and (outcome.terminated or outcome.truncated):
            break
    executed = records[: len(outcomes)]
    for name in records.dtype.names or ():
        if name == "executed":
            executed[name] = True
        elif name == "executed_actions":
            records[name] = actions
            for i in np.flatnonzero(executed["source"]):
                executed[name][i] = outcomes[i].executed_action
        elif name in ATTRIBUTES:
            executed[name] = [getattr(outcome, ATTRIBUTES[name]) for outcome in outcomes]
        else:
            executed[name] = [outcome.extras[name] for outcome in outcomes]


def make_result(obs: Observation, records: Array) -> ChunkResult:
    """Return the result of a chunk step of N envs from the records of their actions [N, C]."""
    fields = {name: records[name] for name in records.dtype.names or ()}
    success = at_last_action(fields["succeeded"], fields["executed"])
    return ChunkResult(obs=obs, success=success, **arrange_fields(ChunkResult, fields))


MakeEnv = Callable[[int], SingleEnv]
"""Factory: env number within the run -> its simulator. Picklable: a module-level function or an attrs instance."""


def env_factory(kind: Callable[..., SingleEnv], *arguments: Any) -> MakeEnv:
    """Return a factory of simulators that all get the same arguments."""
    return partial(_create_env, kind, arguments)


def _create_env(kind: Callable[..., SingleEnv], arguments: Sequence[Any], number: int) -> SingleEnv:
    return kind(*arguments)
