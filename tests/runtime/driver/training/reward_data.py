"""A plugin of kind data for tests: chunks of the scripted simulator's expert, which earn 1, and opposite ones."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from vla_rl.core.contexts import DataContext
from vla_rl.core.declarations import DataPlugin
from vla_rl.core.types import RecordedRewards
from vla_rl.testing import ScriptedEnv
from vla_rl.toolkit.data.samples import InMemoryDataset

COUNT = 32


@frozen(kw_only=True)
class RewardedConfig:
    """No keys."""


class Rewarded(InMemoryDataset):
    """Episodes of one chunk each: a good one and a bad one in turn, from the same observations."""

    def read_rewards(self, indices, discount):
        index = np.asarray(indices)
        return RecordedRewards(rewards=(index % 2 == 0).astype(np.float32), following=np.full(len(index), -1))


def build(config: RewardedConfig, context: DataContext) -> Rewarded:
    env = ScriptedEnv(COUNT, chunk=context.chunk)
    env_ids = np.arange(COUNT)
    states = np.array([state.id for state in env.reset_states("train")])[env_ids // 2 % len(env.reset_states("train"))]
    obs = env.reset(env_ids, states, env_ids)
    actions = np.asarray(env.expert_chunk())
    good = env_ids % 2 == 0
    return Rewarded([(obs, np.where(good[:, None, None], actions, -actions).astype(np.float32))])


vla_rl_plugins = {"data": {"rewarded": DataPlugin(config=RewardedConfig, build=build, summary="for tests")}}
