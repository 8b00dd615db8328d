"""Checks of the settings of `gymnasium` that need no environment instance."""

from __future__ import annotations

from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import at
from vla_rl.plugins.envs.gymnasium.config import GymnasiumConfig
from vla_rl.plugins.envs.gymnasium.simulator import check_registered, import_all, wrapper_class


def check_environment(config: GymnasiumConfig, context: CheckContext) -> None:
    """Raise UserError for an environment id or a wrapper that does not exist."""
    with at("imports"):
        import_all(config)
    with at("id"):
        check_registered(config.id)
    for i, wrapper in enumerate(config.wrappers):
        with at("wrappers", i, "name"):
            wrapper_class(wrapper)
