"""A plugin of kind model for tests: the linear policy with other weights for each condition that an instruction names."""

from __future__ import annotations

import torch
from attrs import evolve

from vla_rl.core.declarations import ModelPlugin
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.scripted import LinearConfig

CONDITIONS = ("positive", "negative")


class ReadingModel(LinearModel):
    """The state counts once for each of `CONDITIONS` and once without any; only the one that is named is not 0."""

    def __init__(self, env, chunk, **keys):
        super().__init__(evolve(env, state_dim=(len(CONDITIONS) + 1) * env.state_dim), chunk, **keys)
        self.read = set()
        """Instructions so far."""

    def _compute_features(self, obs):
        self.read |= set(obs.instructions)
        state = torch.as_tensor(obs.state, device=self._device)
        named = torch.tensor([[word in text for word in CONDITIONS] for text in obs.instructions]).float()
        conditions = torch.cat([named, 1 - named.sum(1, keepdim=True)], 1)
        return (conditions[:, :, None] * state[:, None]).flatten(1)


def build(config, context):
    keys = {"seed": context.seed, "values": context.values, "checkpoint": config.checkpoint}
    return ReadingModel(context.env, context.chunk, **keys)


vla_rl_plugins = {"model": {"reading": ModelPlugin(config=LinearConfig, build=build, summary="for tests")}}
