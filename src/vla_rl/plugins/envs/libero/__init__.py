"""`libero`: the LIBERO benchmark on MuJoCo. See docs/simulators/libero.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.libero.config:LiberoConfig",
    build="vla_rl.plugins.envs.libero.single_env:make_env",
    summary="LIBERO: manipulation with a Franka arm, 130 tasks in five suites, MuJoCo",
    extra="libero",
    env_memory=400_000_000,
    expert=True,
    preflight="vla_rl.plugins.envs.libero.checks:check_rendering",
    check="vla_rl.plugins.envs.libero.checks:check_tasks",
    action_dim=lambda config: 7,
)
