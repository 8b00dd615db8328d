"""A plugin of kind data for tests: first chunks of the scripted simulator's expert, in memory."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from vla_rl.core.contexts import DataContext
from vla_rl.core.declarations import DataPlugin
from vla_rl.testing import ScriptedEnv
from vla_rl.toolkit.data.samples import InMemoryDataset


@frozen(kw_only=True)
class RecordedConfig:
    num_envs: int = 32


def build(config: RecordedConfig, context: DataContext) -> InMemoryDataset:
    env = ScriptedEnv(config.num_envs, chunk=context.chunk)
    env_ids = np.arange(config.num_envs)
    states = np.array([state.id for state in env.reset_states("train")])[env_ids % len(env.reset_states("train"))]
    return InMemoryDataset([(env.reset(env_ids, states, env_ids), env.expert_chunk())])


vla_rl_plugins = {"data": {"recorded": DataPlugin(config=RecordedConfig, build=build, summary="for tests")}}
