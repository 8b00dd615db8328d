"""Checks that every number of an action has an effect over its whole range."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import evolve

from vla_rl.core.types import Array
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.traces import Slack, describe_difference

EXACT = Slack(0.0, 0.0)
NUDGE = 0.03
"""Share of a range that actions are moved by, to see whether small differences count."""
LEVELS = (0.1, 0.9, 0.35, 0.65)
"""Shares of a range that a number takes, one after the other, on both sides of its middle."""
WHOLE = "use the whole range or narrow EnvInfo's bounds; where it is meant, check with whole_range=False"


def ranges_count(player: Player, states: Sequence[int], length: int, whole_range: bool) -> None:
    """Replace parts of the range of one number at a time, and look whether anything differs.

    Args:
        states: what the envs start from.
        whole_range: parts of the range without effect are a finding.
    """
    low, high = (bound.astype(np.float64) for bound in (player.low, player.high))
    idle = []
    for number in range(len(low)):
        part = _part_without_effect(_RangeRollouts(player, states, length, number), low[number], high[number])
        if part == "idle":
            idle.append(number)
        elif part and whole_range:
            expected = f"other actions to lead to something else, over the whole range of number {number}"
            got = f"no effect of {part}, in {length} actions from states {list(states)}"
            player.expect(False, "chunk_step", expected, got, WHOLE)
        elif part:
            player.notice(f"no effect of {part} of number {number} of an action")
    last = len(low) - 1
    if idle and whole_range and idle != [last] and len(set(states)) > 1:
        numbers = ", ".join(str(number) for number in idle)
        got = f"no effect of number {numbers} in {length} actions from states {list(states)}"
        remedy = "apply all of them; where it is meant, check with whole_range=False"
        player.expect(False, "chunk_step", "each number of an action to count", got, remedy)
    elif idle:
        numbers = ", ".join(str(number) for number in idle)
        player.notice(f"not seen: an effect of number {numbers} of an action in {length} actions")


class _RangeRollouts:
    """Random episodes in which one number takes all `LEVELS` of its range, and such with parts of it replaced."""

    def __init__(self, player: Player, states: Sequence[int], length: int, number: int) -> None:
        self._player = player
        self._number = number
        width = min(player.chunk, max(1, length // len(LEVELS)))
        self._widths = [width] * -(-length // width)
        low, high = player.low[number], player.high[number]
        steps = np.arange(length)
        shown = steps % width == width - 1  # the last action of a chunk is the one whose effect is surely seen
        self._scripts = {}
        for env_id, state in enumerate(states):
            script = player.make_script(state, "random", length)
            actions = script.actions.copy()
            order = np.where(shown, steps // width, steps) + env_id
            actions[:, number] = low + np.array(LEVELS)[order % len(LEVELS)] * (high - low)
            self._scripts[env_id] = evolve(script, actions=actions)
        self._first = player.roll_out(self._scripts, widths=self._widths)
        self.shown = np.concatenate(
            [
                self._scripts[env_id].actions[[t - 1 for t in sorted(trace.views) if t], number]
                for env_id, trace in self._first.items()
            ]
        )
        """Values of the number after which something was seen."""

    def unchanged_by(self, change: Callable[[Array], Array]) -> bool:
        """Return whether all episodes stay the same when the number is changed so."""
        return not any(self._find_differences(change))

    def small_changes_matter(self, selects: Callable[[Array], Array], nudge: float) -> bool:
        """Return whether small changes of the number, where `selects`, have an effect in every episode, in both
        directions. A number that acts in steps (a gripper that is open or closed) rightly ignores most small
        differences."""

        def shift_selected(by: float) -> Callable[[Array], Array]:
            return lambda actions: np.where(selects(actions), actions + by, actions)

        return all(all(self._find_differences(shift_selected(by))) for by in (nudge, -nudge))

    def _find_differences(self, change: Callable[[Array], Array]) -> list[bool]:
        scripts = {}
        for env_id, script in self._scripts.items():
            actions = script.actions.copy()
            actions[:, self._number] = change(actions[:, self._number])
            scripts[env_id] = evolve(script, actions=np.clip(actions, self._player.low, self._player.high))
        collected = self._player.roll_out(scripts, widths=self._widths)
        return [bool(describe_difference(self._first[env_id], collected[env_id], EXACT)) for env_id in collected]


def _part_without_effect(rollouts: _RangeRollouts, low: float, high: float) -> str:
    """The part of the range that has no effect, in words; "idle": all of it; nothing: none."""
    middle = 0.0 if low < 0 < high else (low + high) / 2
    if not (rollouts.shown < middle).any() or not (rollouts.shown > middle).any():
        return ""
    nudge, quarter = NUDGE * (high - low), (high - low) / 4
    lower = rollouts.unchanged_by(lambda a: np.maximum(a, middle))
    upper = rollouts.unchanged_by(lambda a: np.minimum(a, middle))
    if lower and upper:
        return "idle" if rollouts.unchanged_by(lambda a: np.where(a > middle, low, high)) else ""
    if lower or upper:
        part = f"{low:g} to {middle:g}" if lower else f"{middle:g} to {high:g}"
        return f"the part from {part}" if rollouts.small_changes_matter(lambda a: (a > middle) == lower, nudge) else ""
    if low == -high and rollouts.unchanged_by(lambda a: -a):
        return f"the sign (-x does what x does, from {low:g} to {high:g})"
    outer = rollouts.unchanged_by(lambda a: np.clip(a, low + quarter, high - quarter))
    if outer and rollouts.small_changes_matter(lambda a: np.abs(a - (low + high) / 2) < quarter, nudge):
        return f"the outer half (beyond {low + quarter:g} and {high - quarter:g})"
    return ""
