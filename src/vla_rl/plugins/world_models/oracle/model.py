"""Oracle world model: replays the recorded actions from the reset on, then executes the chunk in question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_rl.core.catalogue import build
from vla_rl.core.contexts import EnvContext, WorldModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import read_env
from vla_rl.core.types import Array, ChunkResult, EnvInfo, Observation, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.plugins.world_models.oracle.config import OracleConfig


def make_oracle(config: OracleConfig, context: WorldModelContext) -> Oracle:
    """Build the simulator, and return the oracle on it. Raise UserError where it cannot serve."""
    section = read_env(config.env, config.keys)
    place = EnvContext(seed=context.seed, device=context.device, chunk=context.chunk, num_envs=config.num_envs)
    return Oracle(build("env", config.env, section.config, place), config, context.env)


class Oracle(WorldModel):
    """World model that asks the true simulator: an upper bound for learnt ones, and for tests."""

    def __init__(self, env: SimEnv, config: OracleConfig, run: EnvInfo) -> None:
        """Create the oracle on a simulator; `run` describes the simulator whose episodes are imagined. Raise UserError
        where the two differ in cameras, state or actions, and for a simulator that is not deterministic."""
        self.env = env
        self.history = config.history
        self._last: tuple[Any, Any, ChunkResult] | None = None
        for name in ("cameras", "state_dim", "action_low", "action_high"):
            simulated = getattr(env.info, name)
            expected = getattr(run, name)
            if simulated != expected:
                raise UserError(
                    f"world model 'oracle': its env {config.env!r} has {name} {simulated}, and the run's simulator "
                    f"{expected}; give it the same settings (world_model.keys)"
                )
        if not env.info.deterministic:
            raise UserError(f"world model 'oracle' plays episodes again, and env {config.env!r} is not deterministic")

    def fit(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        """Return no metrics: there is nothing to learn."""
        return {}

    def imagine(self, windows: Windows, actions: Array, noise: Noise) -> Observation:
        return self._compute_result(windows, actions).obs

    def outcome(self, windows: Windows, actions: Array, after: Observation) -> Array:
        """Return the true outcome as probabilities of 0 and 1, whatever `after` shows."""
        width, result = actions.shape[1], self._compute_result(windows, actions)
        ended = to_numpy(result.terminated)
        won = np.where(to_numpy(result.success), 1, 1 + width) + ended.argmax(1)
        chances: Array = np.eye(1 + 2 * width, dtype=np.float32)[np.where(ended.any(1), won, 0)]
        return chances

    def close(self) -> None:
        self.env.close()

    def _compute_result(self, windows: Windows, actions: Array) -> ChunkResult:
        """Return the result of the chunk after each window, in NumPy."""
        if (windows.first > 0).any():
            missing = int(windows.first.max())
            raise UserError(
                f"world model 'oracle' needs all chunks since the reset, and windows of history {self.history} lack "
                f"the first {missing}; set its `history` to the chunks of the longest episode, horizon included"
            )
        if self._last is not None and self._last[0] is windows and self._last[1] is actions:
            return self._last[2]  # `outcome` after `imagine`, of the same chunk
        results = [self._execute_chunk(windows, actions, first) for first in range(0, len(actions), self.env.num_envs)]
        self._last = windows, actions, ChunkResult.concat(results)
        return self._last[2]

    def _execute_chunk(self, windows: Windows, actions: Array, first: int) -> ChunkResult:
        num_envs = self.env.num_envs
        window_ids = np.minimum(np.arange(first, first + num_envs), len(actions) - 1)  # the last window pads the batch
        self.env.reset(np.arange(num_envs), windows.states[window_ids], windows.seeds[window_ids])
        for chunk, executed in zip(
            windows.actions[window_ids].swapaxes(0, 1), windows.executed[window_ids].swapaxes(0, 1), strict=True
        ):
            counts = executed.sum(1)
            for width in np.unique(counts[counts > 0]):
                self.env.chunk_step(chunk[:, :width], counts == width, True)
        result = self.env.chunk_step(to_numpy(actions)[window_ids], np.ones(num_envs, bool), True)
        # A copy: the next chunk may overwrite what a simulator returned.
        return result.take(np.arange(min(num_envs, len(actions) - first))).numpy()
