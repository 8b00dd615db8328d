"""Checks that a person can watch what a spec runs."""

from __future__ import annotations

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.reward_models.person.config import PersonConfig


def check_one_env(config: PersonConfig, context: CheckContext) -> None:
    """Raise UserError for several envs."""
    if context.num_envs > 1:
        raise UserError(
            f"a person watches one robot at a time, and there are {context.num_envs} envs; give env.num_envs: 1"
        )
