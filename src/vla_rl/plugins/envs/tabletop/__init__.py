"""`tabletop`: the built-in simulator, in plain torch. See docs/simulators/tabletop.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.tabletop.config:TabletopConfig",
    build="vla_rl.plugins.envs.tabletop.simulator:Tabletop",
    summary="Embedded: pick and put coloured blocks; batched torch, two cameras, no GL",
    expert=True,
    env_info="vla_rl.plugins.envs.tabletop.config:describe_env",
    action_dim=lambda config: 3,
)
