"""Settings of `person`."""

from __future__ import annotations

from attrs import frozen

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
