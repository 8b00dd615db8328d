"""The contract of reward models, which judge success instead of the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from vla_rl.core.hookspecs import hookspec
from vla_rl.core.types import Array, ArrayOrTensor, Observation


class RewardModel(ABC):
    """A teller of success, for robots and simulators that do not know it: a classifier of frames, or a person. Where a
    spec has `rewards:`, its success ends an episode and gives the reward 1; the simulator's own rewards and success
    count for nothing. Each worker with simulators has one. Entry-point group `vla_rl.reward_models`."""

    deterministic: bool = True
    """Equal observations get equal answers. If not, env streams (`auto_reset`) cannot be replayed: new episodes."""
    watches: bool = False
    """`watch` is called after each action, so chunks are executed action by action and cameras render after each."""
    waits_s: float = 0.0
    """Longest time that a call waits for a person, in seconds; `runtime.deadline_s` has to exceed twice this time."""
    stop_requested: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the run has to stop (Ctrl-C). Core sets it; a call that waits asks it, and raises StopRequested."""

    @abstractmethod
    @hookspec(firstresult=True)
    def success_probability(self, obs: Observation, ends: Array) -> ArrayOrTensor:
        """Return the probability that the task is solved, float32 [B] from 0 to 1, in the observations after a chunk.
        `ends` (bool [B]) marks episodes that end with this chunk, whatever the answer is."""

    @hookspec(firstresult=True)
    def failed(self, obs: Observation) -> ArrayOrTensor | None:
        """Return the episodes that end as failures, bool [B]; None: no episode. Called after `success_probability`,
        with the same observations; a success is not a failure. Optional."""
        return None

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def before_reset(self, env_ids: Array) -> None:
        """Called before these envs (int64 [R]) are reset; may wait for a person, and raise SafetyStop. Optional."""

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def watch(self, obs: Observation | None) -> None:
        """Called before each chunk, with None, and with `watches` after each of its actions, with the observations of
        all envs; raises SafetyStop to end the run before the next action. Optional."""

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def close(self) -> None:
        """Free what the model opened. Optional; may be called twice."""
