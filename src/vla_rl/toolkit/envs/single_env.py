"""The interface of a simulator with one scene: a plugin writes a `SingleEnv`, and `SubprocEnvs`
(`subproc_envs.py`) makes N of them a `SimEnv`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import ActionSource, Array


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


class View(NamedTuple):
    """Observation of one env."""

    images: Mapping[str, Array]
    """Images by camera, uint8 [H, W, 3], upright."""
    state: Array | None = None
    """Proprioceptive state, float32 [S]."""
    instruction: str | None = None
    """Instruction of the episode; None: the task's."""


class SingleEnv(ABC):
    """One simulator instance with one scene. It is created in the process it lives in, and may build its scene as late
    as the first reset."""

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


class ChunkRecord:
    """What happened in a chunk of one env."""

    def __init__(self, actions: Array) -> None:
        """Create the record of a chunk, float32 [C, A], of which nothing is executed yet."""
        self._actions = actions
        self.rewards = np.zeros(len(actions), np.float32)
        """float32 [C]."""
        self.flags = np.zeros((5, len(actions)), bool)
        """success, terminated, truncated, executed and late, bool [5, C]."""
        self.source = np.full(len(actions), ActionSource.POLICY, np.int8)
        """`ActionSource` of each action, int8 [C]."""
        self.executed_actions = actions.copy()
        """float32 [C, A]."""

    def execute_chunk(self, step: Callable[[Array], Outcome], stop_at_end: bool) -> None:
        """Execute the chunk by `step`, up to the end of the episode if `stop_at_end`."""
        for i, action in enumerate(self._actions):
            outcome = step(action)
            self.rewards[i] = outcome.reward
            self.flags[:, i] = (*outcome[1:4], True, outcome.late)
            if outcome.source != ActionSource.POLICY:
                self.source[i] = outcome.source
                self.executed_actions[i] = outcome.executed_action
            if stop_at_end and (outcome.terminated or outcome.truncated):
                break


MakeEnv = Callable[[int], SingleEnv]
"""Factory: env number within the run -> its simulator. Must be picklable: a module-level function or an attrs
instance."""
