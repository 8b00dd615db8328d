"""Plugins for `benchmarks/runtime.py --only scale`: a policy without a network, and the tabletop with a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from attrs import frozen

from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.declarations import EnvPlugin, ModelPlugin
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Chunk, ChunkResult, Observation, ResetState
from vla_rl.plugins.envs.tabletop.config import TabletopConfig, describe_env
from vla_rl.testing.linear import LinearModel


class NoNetwork(LinearModel):
    """A policy that plays uniform random numbers: what is left of acting is the runtime's part."""

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        draws = torch.from_numpy(noise.uniforms(self._chunk, self.tokens_per_action))
        return Chunk(
            actions=2 * draws - 1,
            log_probs=torch.zeros_like(draws),
            values=None if self._values == "none" else torch.zeros(len(obs)),
            extras={"tokens": draws},
        )

    def values(self, obs: Observation) -> torch.Tensor:
        return torch.zeros(len(obs))


class TimedTabletop(SimEnv):
    """The tabletop simulator, whose processor time is counted."""

    seconds = 0.0
    """Processor time of all its envs so far."""

    def __init__(self, config: TabletopConfig, context: EnvContext) -> None:
        from vla_rl.plugins.envs.tabletop.simulator import Tabletop

        self._env = Tabletop(config, context)
        self.num_envs = self._env.num_envs
        self.info = self._env.info

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._env.reset_states(split)

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        return timed(lambda: self._env.reset(env_ids, state_ids, seed))

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return timed(lambda: self._env.chunk_step(actions, active, stop_at_end))


def timed(work: Callable[[], Any]) -> Any:
    start = process_time()
    result = work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    TimedTabletop.seconds += process_time() - start
    return result


@frozen(kw_only=True)
class NoNetworkConfig:
    """No keys."""


def build(config: NoNetworkConfig, context: ModelContext) -> NoNetwork:
    return NoNetwork(context.env, context.chunk, values=context.values)


vla_rl_plugins = {
    "model": {"random_actions": ModelPlugin(config=NoNetworkConfig, build=build, summary="plays random numbers")},
    "env": {
        "timed_tabletop": EnvPlugin(
            config=TabletopConfig, build=TimedTabletop, env_info=describe_env, summary="tabletop with a stopwatch"
        )
    },
}
