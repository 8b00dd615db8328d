"""What can be asked for on the table: pure data, no torch."""

from __future__ import annotations

from attrs import frozen

COLOURS = ("red", "green", "blue", "yellow")


@frozen(kw_only=True)
class TabletopTask:
    """One instruction. `pick` starts with an empty gripper, `put` with a block in it."""

    verb: str
    colour: int
    """Index into `COLOURS` of the block to pick or the plate to put on."""

    @property
    def name(self) -> str:
        return f"{self.verb}_{COLOURS[self.colour]}"

    @property
    def instruction(self) -> str:
        colour = COLOURS[self.colour]
        return f"pick up the {colour} block" if self.verb == "pick" else f"put the block on the {colour} plate"


TASKS = tuple(TabletopTask(verb=verb, colour=colour) for verb in ("pick", "put") for colour in range(len(COLOURS)))
TASK_NAMES = tuple(task.name for task in TASKS)
