"""`gym_hil`: a Franka in MuJoCo in which a person, or a scripted one, takes over from the policy. See
docs/simulators/gym_hil.md."""

from __future__ import annotations

from importlib.util import find_spec

from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.installation import pip_command


def find_missing() -> str | None:
    """Return what is missing to use the plugin, or None."""
    command = f"{pip_command('install')} --no-deps gym-hil"
    return None if find_spec("gym_hil") else f"gym-hil: {command} (devices also need its dependencies)"


plugin = EnvPlugin(
    config="vla_rl.plugins.envs.gym_hil.config:GymHilConfig",
    build="vla_rl.plugins.envs.gym_hil.env:make_envs",
    summary="a Franka lifts a cube in MuJoCo, and a person or a script may take over (gym-hil)",
    preflight="vla_rl.plugins.envs.gym_hil.env:try_out",
    check="vla_rl.plugins.envs.gym_hil.config:check_device_sharing",
    lacks=find_missing,
    action_dim=lambda config: 4,
)
