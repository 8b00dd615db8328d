"""`metaworld`: the fifty tasks of Meta-World on MuJoCo. See docs/simulators/metaworld.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.metaworld.config:MetaWorldConfig",
    build="vla_rl.plugins.envs.metaworld.single_env:make_env",
    summary="Meta-World: fifty manipulation tasks with a Sawyer arm, MuJoCo",
    extra="metaworld",
    env_memory=800_000_000,
    expert=True,
    env_info="vla_rl.plugins.envs.metaworld.config:describe_env",
    preflight="vla_rl.plugins.envs.metaworld.config:check_rendering",
    action_dim=lambda config: 4,
)
