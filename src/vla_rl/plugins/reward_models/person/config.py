"""Settings of `person`."""

from __future__ import annotations

from attrs import frozen

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
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
    """Camera whose image the page shows; null: the first one."""


def check_one_env(config: PersonConfig, context: CheckContext) -> None:
    """Raise UserError for several envs: a person watches one."""
    if context.num_envs > 1:
        raise UserError(
            f"a person watches one robot at a time, and there are {context.num_envs} envs; give env.num_envs: 1"
        )
