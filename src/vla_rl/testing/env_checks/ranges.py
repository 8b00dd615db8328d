"""Does every number of an action have an effect, over its whole range?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import evolve

from vla_rl.core.types import Array
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.traces import EXACT, describe_difference

NUDGE = 0.03
"""Share of a range that actions are moved by, to see whether small differences count."""
LEVELS = (0.1, 0.9, 0.35, 0.65)
"""Shares of a range that a number takes, one after the other, on both sides of its middle."""
MEANT = "where it is meant, check with whole_range=False"


def check_ranges(player: Player, states: Sequence[int], length: int) -> None:
    """Replace parts of the range of one number at a time, and look whether anything differs. `states`: what the envs
    start from."""
    idle, whole_range = [], player.options.check_range
    for number in range(len(player.low)):
        part = _RangeRollouts(player, states, length, number).part_without_effect()
        if part == "idle":
            idle.append(str(number))
        elif part and whole_range:
            expected = f"other actions to lead to something else, over the whole range of number {number}"
            got = f"no effect of {part}, in {length} actions from states {list(states)}"
            remedy = f"use the whole range or narrow EnvInfo's bounds; {MEANT}"
            player.expect(False, "chunk_step", expected, got, remedy)
        elif part:
            player.notice(f"no effect of {part} of number {number} of an action")
    numbers = ", ".join(idle)
    if idle and whole_range and idle != [str(len(player.low) - 1)] and len(set(states)) > 1:
        got = f"no effect of number {numbers} in {length} actions from states {list(states)}"
        remedy = f"apply all of them; {MEANT}"
        player.expect(False, "chunk_step", "each number of an action to count", got, remedy)
    elif idle:
        player.notice(f"not seen: an effect of number {numbers} of an action in {length} actions")


class _RangeRollouts:
    """Random episodes in which one number takes all `LEVELS` of its range, and such with parts of it replaced."""

    def __init__(self, player: Player, states: Sequence[int], length: int, number: int) -> None:
        self._player = player
        self._number = number
        self._low = float(player.low[number])
        self._high = float(player.high[number])
        width = min(player.chunk, max(1, length // len(LEVELS)))
        self._widths = [width] * -(-length // width)
        steps = np.arange(length)
        shown = steps % width == width - 1  # the last action of a chunk is the one whose effect is surely seen
        self._scripts = {}
        for env_id, state in enumerate(states):
            script = player.make_script(state, "random", length)
            order = np.where(shown, steps // width, steps) + env_id
            levels = self._low + np.array(LEVELS)[order % len(LEVELS)] * (self._high - self._low)
            script.actions[:, number] = levels
            self._scripts[env_id] = script
        self._first = player.roll_out(self._scripts, widths=self._widths)
        at = {env_id: [t - 1 for t in sorted(trace.views) if t] for env_id, trace in self._first.items()}
        self._shown = np.concatenate([script.actions[at[e], number] for e, script in self._scripts.items()])
        """Values of the number after which something was seen."""

    def part_without_effect(self) -> str:
        """The part of the range that has no effect, in words; "idle": all of it; nothing: none."""
        low, high, unchanged_by = self._low, self._high, self._unchanged_by
        middle = 0.0 if low < 0 < high else (low + high) / 2
        if not (self._shown < middle).any() or not (self._shown > middle).any():
            return ""
        lower = unchanged_by(lambda a: np.maximum(a, middle))
        upper = unchanged_by(lambda a: np.minimum(a, middle))
        if lower and upper:
            return "idle" if unchanged_by(lambda a: np.where(a > middle, low, high)) else ""
        if lower or upper:
            part = f"the part from {low:g} to {middle:g}" if lower else f"the part from {middle:g} to {high:g}"
            return part if self._small_changes_matter(lambda a: (a > middle) == lower) else ""
        if low == -high and unchanged_by(lambda a: -a):
            return f"the sign (-x does what x does, from {low:g} to {high:g})"
        quarter = (high - low) / 4
        outer = unchanged_by(lambda a: np.clip(a, low + quarter, high - quarter))
        if outer and self._small_changes_matter(lambda a: np.abs(a - (low + high) / 2) < quarter):
            return f"the outer half (beyond {low + quarter:g} and {high - quarter:g})"
        return ""

    def _unchanged_by(self, change: Callable[[Array], Array]) -> bool:
        """Return whether all episodes stay the same when the number is changed so."""
        return not any(self._find_differences(change))

    def _small_changes_matter(self, selects: Callable[[Array], Array]) -> bool:
        """Return whether small changes of the number, where `selects`, have an effect in every episode, in both
        directions. A number that acts in steps (a gripper that is open or closed) rightly ignores most small
        differences."""
        nudge = NUDGE * (self._high - self._low)
        up, down = (lambda a: np.where(selects(a), a + nudge, a)), (lambda a: np.where(selects(a), a - nudge, a))
        return all(all(self._find_differences(shift)) for shift in (up, down))

    def _find_differences(self, change: Callable[[Array], Array]) -> list[bool]:
        scripts = {}
        for env_id, script in self._scripts.items():
            actions = script.actions.copy()
            actions[:, self._number] = change(actions[:, self._number])
            scripts[env_id] = evolve(script, actions=np.clip(actions, self._player.low, self._player.high))
        again = self._player.roll_out(scripts, widths=self._widths)
        return [bool(describe_difference(self._first[env_id], trace, EXACT)) for env_id, trace in again.items()]
