"""`maniskill`: ManiSkill 3 on SAPIEN, on CPUs or batched on a GPU. See docs/simulators/maniskill.md."""

from __future__ import annotations

from typing import Any

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.envs.maniskill import checks
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig

__all__ = ["ManiSkillConfig", "plugin"]


def build(config: ManiSkillConfig, context: Context) -> Any:
    from vla_rl.plugins.envs.maniskill.env import make_env

    return make_env(config, context)


plugin = Plugin(
    config=ManiSkillConfig,
    build=build,
    summary="ManiSkill 3: manipulation on SAPIEN, on processors or batched on a GPU",
    extra="maniskill",
    env_memory=650_000_000,
    preflight=checks.preflight,
    check=checks.check,
    action_dim=checks.action_dim,
    expert=True,
)
