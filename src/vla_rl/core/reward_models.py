"""The contract of reward models: what tells success instead of the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vla_rl.core.hookspecs import hookspec
from vla_rl.core.types import Array, ArrayOrTensor, Observation


class RewardModel(ABC):
    """A judge of success, for robots and simulators that do not know it: a classifier of frames, or a person. Where a
    spec has `rewards:`, its success ends an episode and gives the reward 1; the simulator's own rewards and success
    count for nothing. Each worker with simulators has one. Entry-point group `vla_rl.reward_models`."""

    @abstractmethod
    @hookspec(firstresult=True)
    def success_probability(self, obs: Observation, ends: Array) -> ArrayOrTensor:
        """Return the probability that the task is solved, float32 [B] from 0 to 1, in the observations after a chunk.
        `ends` (bool [B]) marks episodes that end with this chunk, whatever the answer is."""
