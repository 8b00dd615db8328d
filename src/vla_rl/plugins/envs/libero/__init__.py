"""`libero`: the LIBERO benchmark on MuJoCo, and `libero_warp`: its tasks in batches on MuJoCo Warp. See
docs/simulators/libero.md and docs/simulators/libero_warp.md."""

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

libero_warp = EnvPlugin(
    config="vla_rl.plugins.envs.libero.warp.config:LiberoWarpConfig",
    build="vla_rl.plugins.envs.libero.warp.env:make_env",
    summary="LIBERO's tasks in batches on a GPU, MuJoCo Warp: other states and images than the official ones",
    extra="libero-warp",
    preflight="vla_rl.plugins.envs.libero.warp.checks:check_installation",
    check="vla_rl.plugins.envs.libero.warp.checks:check_tasks",
    action_dim=lambda config: 7,
)
