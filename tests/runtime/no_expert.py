"""A plugin in one module: the scripted double, whose plugin promises an expert that its tasks do not have."""

from __future__ import annotations

from typing import Any

import attrs

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.errors import UserError
from vla_rl.testing.scripted import ScriptedConfig, ScriptedEnv


class WithoutExpert(ScriptedEnv):
    def expert_chunk(self) -> Any:
        raise UserError("no task of these has one")


def build(config: ScriptedConfig, context: EnvContext) -> WithoutExpert:
    return WithoutExpert(context.num_envs, chunk=context.chunk, first_env=context.first_env, **attrs.asdict(config))


vla_rl_plugins = {
    "env": {"without_expert": EnvPlugin(config=ScriptedConfig, build=build, summary="no expert after all", expert=True)}
}
