"""`person`: a person beside the robot tells success and failure, resets the scene, and can stop the robot."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.people.settings import PanelSettings


@frozen(kw_only=True)
class PersonConfig(PanelSettings):
    """Spec keys of the reward model `person`."""

    reset: bool = True
    """Before each episode, wait until the person says that the scene is reset. False: the simulator resets it."""
    outcome: bool = True
    """Ask for the outcome of episodes that end without an answer, by the step limit or by the simulator. False: they
    count as failures."""
    camera: str | None = None
    """Camera whose picture the page shows; null: the first one."""


def check(config: PersonConfig, context: Context) -> None:
    """Raise UserError for several envs."""
    if context.num_envs > 1:
        raise UserError(
            f"a person watches one robot at a time, and there are {context.num_envs} envs; give env.num_envs: 1"
        )


def build(config: PersonConfig, context: Context) -> Any:
    from vla_rl.plugins.reward_models.person.impl import PersonRewards

    return PersonRewards(config, context)


plugin = Plugin(
    config=PersonConfig,
    build=build,
    summary="a person tells success, resets the scene and stops the robot",
    check=check,
)
