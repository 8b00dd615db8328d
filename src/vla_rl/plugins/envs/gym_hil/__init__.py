"""`gym_hil`: a Franka in MuJoCo in which a person, or a scripted one, takes over from the policy. See
docs/simulators/gym_hil.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.gym_hil.config:GymHilConfig",
    build="vla_rl.plugins.envs.gym_hil.env:make_envs",
    summary="a Franka lifts a cube in MuJoCo, and a person or a script may take over (gym-hil)",
    preflight="vla_rl.plugins.envs.gym_hil.env:try_out",
    check="vla_rl.plugins.envs.gym_hil.config:check_device_sharing",
    lacks="vla_rl.plugins.envs.gym_hil.interpreter:find_missing",
    action_dim=lambda config: 4,
)
