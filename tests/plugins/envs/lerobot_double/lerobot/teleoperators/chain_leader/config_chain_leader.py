from dataclasses import dataclass

from lerobot.teleoperators.config import TeleoperatorConfig


@TeleoperatorConfig.register_subclass("chain_leader")
@dataclass
class ChainLeaderConfig(TeleoperatorConfig):
    """A leader arm, which a script moves to a goal. Its port is a file."""

    port: str
    goal: float = 40.0


@TeleoperatorConfig.register_subclass("chain_stick")
@dataclass
class ChainStickConfig(TeleoperatorConfig):
    """The same with buttons: the script takes over from action `first` to `last`, and then presses `button`."""

    port: str
    goal: float = 40.0
    first: int = 3
    last: int = 6
    button: str | None = "success"
    every: int = 12
    """Actions after which the script begins again."""
