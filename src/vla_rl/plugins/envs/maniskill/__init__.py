"""`maniskill`: ManiSkill 3 on SAPIEN, on CPUs or batched on a GPU. See docs/simulators/maniskill.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.maniskill.config:ManiSkillConfig",
    build="vla_rl.plugins.envs.maniskill.env:make_env",
    summary="ManiSkill 3: manipulation on SAPIEN, on processors or batched on a GPU",
    extra="maniskill",
    env_memory=650_000_000,
    expert=True,
    preflight="vla_rl.plugins.envs.maniskill.env:check_simulator",
    check="vla_rl.plugins.envs.maniskill.checks:check_tasks",
    action_dim="vla_rl.plugins.envs.maniskill.checks:action_dim",
)
