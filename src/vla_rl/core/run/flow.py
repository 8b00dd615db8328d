"""The scheduler of a run: which trajectories may be collected now, and which training step uses them.

A **ticket** is one trajectory to be collected (elsewhere: rollout request). Tickets are numbered through the whole run;
group g holds the tickets g * G .. g * G + G - 1, with G the group size. Training steps consume groups in the order of
their numbers. The tickets issued at any time are those that the running step still wants, plus those of
`max_lag * groups_per_step` further groups. So

- every chunk is at most `max_lag` training steps old when it is trained on, since each of the steps after the running
  one consumes at least `groups_per_step` groups;
- nothing is discarded for its age, short trajectories are not favoured, and at most
  `(max_lag + 1) * groups_per_step` groups are between their issue and the end of their step;
- `max_lag: 0` is synchronous, on-policy training.

If a filter drops groups, the running step may want others: dynamic sampling only issues further tickets. The scheduler
is pure: no thread, no clock, no process. A run and `vla-rl plan` drive the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

from attrs import define, field, frozen

End = Literal["trained", "discarded"]


@frozen(order=True)
class Ticket:
    """One trajectory to be collected, by its number through the whole run, and its group."""

    number: int
    group: int


@define(kw_only=True)
class Ledger:
    """Counts of how the groups before `first` ended. A checkpoint keeps this part of the flow."""

    step: int = 0
    """Training steps that are finished."""
    first: int = 0
    """First group that no step has consumed."""
    trained: int = 0
    filtered: int = 0
    discarded: int = 0
    """Tickets by how they ended: trained on, dropped by a filter, or discarded in a step without training."""


@define(kw_only=True, eq=False, slots=False)
class Flow:
    """Issues tickets, records collected ones, and hands groups to training steps."""

    groups_per_step: int
    """Groups that a training step wants."""
    steps: int
    """Training steps of the run."""
    group_size: int = 1
    """Tickets in a group."""
    max_lag: int = 0
    """Training steps that a chunk may be old when it is trained on."""
    resampled_groups: int = 0
    """Groups that a step may consume beyond `groups_per_step`, in place of filtered ones."""
    ledger: Ledger = field(factory=Ledger)
    """Counts to resume from. Groups that were not consumed are issued again under the same numbers."""

    def __attrs_post_init__(self) -> None:
        self.next_group = self.ledger.first
        """Next group to issue."""
        self.cursor = self.ledger.first
        """Next group to consume."""
        self.kept: Sequence[int] = ()
        """Groups that the running step has consumed and will train on."""
        self.uncollected: dict[int, set[int]] = {}
        """Group -> its tickets that are still to be collected, for all groups issued and not yet consumed."""

    @property
    def step(self) -> int:
        """Training steps that are finished."""
        return self.ledger.step

    @property
    def groups_held(self) -> int:
        """Number of groups between their issue and the end of their step; dropped groups no longer count."""
        return len(self.uncollected) + len(self.kept)

    @property
    def groups_wanted(self) -> int:
        """Number of groups that the running step has still to consume."""
        tried = self.cursor - self.ledger.first
        return min(self.groups_per_step - len(self.kept), self.groups_per_step + self.resampled_groups - tried)

    @property
    def tickets_needed(self) -> list[int]:
        """Tickets that the running step waits for."""
        groups = range(self.cursor, min(self.cursor + self.groups_wanted, self.next_group))
        return sorted(number for group in groups for number in self.uncollected[group])

    @property
    def groups_ready(self) -> list[int]:
        """Complete groups among those the running step consumes next, up to the first incomplete one."""
        groups = range(self.cursor, self.cursor + self.groups_wanted)
        return list(takewhile(lambda group: not self.uncollected.get(group, {-1}), groups))

    def tickets_of(self, groups: Sequence[int]) -> list[int]:
        size = self.group_size
        return [number for group in groups for number in range(group * size, (group + 1) * size)]

    @property
    def tickets_running(self) -> list[int]:
        """All tickets that are still to be collected."""
        return sorted(number for numbers in self.uncollected.values() for number in numbers)

    def issue_tickets(self) -> list[Ticket]:
        """Return the tickets that may start now, in the order in which they should. Each is returned once."""
        tickets = []
        ahead = min(self.max_lag, self.steps - self.step - 1)
        while self.next_group < self.cursor + self.groups_wanted + ahead * self.groups_per_step:
            first = self.next_group * self.group_size
            numbers = range(first, first + self.group_size)
            self.uncollected[self.next_group] = set(numbers)
            tickets += [Ticket(number, self.next_group) for number in numbers]
            self.next_group += 1
        return tickets

    def record_ticket(self, number: int) -> None:
        """Record that a ticket was collected. Raise ValueError for one not issued or already recorded."""
        try:
            self.uncollected[number // self.group_size].remove(number)
        except KeyError:
            raise ValueError(f"ticket {number} is not being collected") from None

    def take_groups(self) -> list[int] | None:
        """Consume and return the groups that the running step still wants, once they are all collected. None: not
        complete yet. []: the step has everything it gets, and `finish_step` may be called."""
        groups = self.groups_ready
        if len(groups) < self.groups_wanted:
            return None
        self.cursor += len(groups)
        for group in groups:
            del self.uncollected[group]
        self.kept = [*self.kept, *groups]
        return groups

    def keep_groups(self, groups: Sequence[int]) -> None:
        """Set the groups that the filters keep, out of all that the running step has consumed."""
        self.kept = groups

    def finish_step(self, end: End = "trained") -> None:
        """End the step, whose weights are published, and begin the next one."""
        ledger = self.ledger
        num_kept = len(self.kept) * self.group_size
        consumed = (self.cursor - ledger.first) * self.group_size
        setattr(ledger, end, getattr(ledger, end) + num_kept)
        ledger.filtered += consumed - num_kept
        ledger.first = self.cursor
        ledger.step += 1
        self.kept = ()
