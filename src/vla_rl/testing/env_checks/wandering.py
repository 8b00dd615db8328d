"""What random, extreme and held actions bring about: ends, successes, rewards, and whether actions count at all."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from attrs import evolve

from vla_rl.testing.env_checks.player import KINDS, End, Player
from vla_rl.testing.env_checks.scenes import spread
from vla_rl.testing.env_checks.traces import Script, Slack, Trace, difference
from vla_rl.testing.findings import LeftOut

ROUNDS, FEWEST = 32, 12
"""Episodes of every row: at most, and where ends and successes were seen."""
EXACT = Slack(0.0, 0.0)
ENOUGH = 16
"""Actions after which something that never changed counts as standing still, where episodes are longer."""


def wander(player: Player) -> tuple[dict[int, Trace], list[Trace]]:
    """Play episodes from many states. -> the very first ones, and those that ended."""
    began = perf_counter()
    first: dict[int, Trace] = {}
    ended: list[Trace] = []
    splits = {split: spread(states) for split, states in player.splits.items() if states}
    for index in range(ROUNDS):
        states = splits.get("eval" if index % 4 == 3 else "train", splits["train"])
        told = player.seen.won and player.seen.lost and len(ended) > 2 * len(player.rows)
        limit = (0.15 if index < FEWEST else 0.04) * player.seconds
        if index > 1 and (perf_counter() - began > limit or (told and index >= FEWEST)):
            break
        scripts = {}
        for row in (int(row) for row in player.rows):
            number = row if player.slow else index * len(player.rows) + row
            state = states[number % len(states)].id
            length = min(player.limit(state), player.chunk * player.affordable(0.05, 1, player.limit(state)))
            scripts[row] = player.script(state, KINDS[(index + row) % len(KINDS)], length, key=index)
        traces = player.play(scripts, keep=lambda t: False)
        first = first or traces
        ended += [trace for trace in traces.values() if trace.end is not None]
    return first, ended


def actions_count(player: Player) -> None:
    """Other actions lead to something else, be it seen, rewarded or an end."""
    states = [state.id for state in spread(player.splits["train"])[: len(player.rows)]]
    whole = min(player.limit(state) for state in states)
    length = min(whole, player.chunk * player.affordable(0.06, 4, whole))
    played = [_play(player, states, kind, length) for kind in ("lowest", "highest", "random", "extreme")]
    if _all_equal(played):
        text = f"the same from states {states} after {length} actions at the lower bounds, at the upper ones, and drawn"
        if length < min(whole, ENOUGH):
            player.notice(f"not seen: an effect of actions; {text}")
            return
        expected = "other observations, rewards or ends after other actions"
        player.expect(False, "chunk_step", expected, text, "apply the actions that are given")
        return
    _each_number_counts(player, states, length, whole)


def _each_number_counts(player: Player, states: Sequence[int], length: int, whole: int) -> None:
    numbers = len(player.low)
    play = player.cost("reset") + -(-length // player.chunk) * player.cost("chunk_step")
    if numbers < 2 or length < min(whole, ENOUGH) or 2 * numbers * play > 0.06 * player.seconds:
        return
    idle = []
    for number in range(numbers):
        pair = []
        for bound in (player.low, player.high):
            scripts = {}
            for row, state in enumerate(states):
                script = player.script(state, "random", length)
                actions = script.actions.copy()
                actions[:, number] = bound[number]
                scripts[row] = evolve(script, actions=actions)
            pair.append(player.play(scripts))
        if _all_equal(pair):
            idle.append(str(number))
    if idle:
        player.notice(f"not seen: an effect of number {', '.join(idle)} of an action in {length} actions")


def _play(player: Player, states: Sequence[int], kind: str, length: int) -> dict[int, Trace]:
    return player.play({row: player.script(state, kind, length) for row, state in enumerate(states)})


def _all_equal(played: Sequence[dict[int, Trace]]) -> bool:
    return not any(difference(played[0][row], other[row], EXACT) for other in played[1:] for row in other)


def success_is_told(player: Player) -> None:
    """Success is neither always nor never true, and does not contradict a reward that is given at ends only."""
    seen = player.seen
    if not seen.chunks:
        raise LeftOut("not done: no chunk was played")
    rewarded = [end for end in seen.ends if end.terminated and end.reward > 0 and end.earlier == 0]
    once = len({end.reward for end in rewarded}) == 1 and (len(rewarded) > 1 or rewarded[0].steps > 1)
    if once and not seen.rewarded_between and not any(end.success for end in rewarded):
        got = f"no success in {len(rewarded)} such ends{_opposite(seen.ends)}"
        expected = f"success where an episode ends with the only reward that it gives, {rewarded[0].reward:g}"
        player.expect(False, "chunk_step: success", expected, got, "tell the task's predicate")
    elif seen.won and not seen.lost:
        got = f"success after each of {seen.chunks} chunks, whatever was done"
        player.expect(False, "chunk_step: success", "False until the task is solved", got, "tell the task's predicate")
    elif not seen.won:
        player.notice(f"not seen: success; {seen.chunks} chunks were played")
    late = [end for end in seen.ends if end.steps == end.limit > 1]
    if len(late) > 2 and all(end.terminated and not end.success for end in late):
        player.notice(
            "episodes that last to the step limit are terminated there, not truncated: right only if the task is lost"
        )
    if not seen.ends:
        player.notice(f"not seen: an end; {seen.chunks} chunks were played")
    if not seen.rewarded:
        player.notice("not seen: a reward other than 0")


def _opposite(ends: Sequence[End]) -> str:
    return ", but in others" if any(end.success for end in ends) else ""


def what_is_shown_changes(player: Player) -> None:
    """What differs between scenes changes while rows move, too; in the pictures or in the state."""
    seen = player.seen
    told = {name: "the state" if name == "state" else f"the image of camera {name!r}" for name in seen.moved}
    still = [told[name] for name, moved in seen.moved.items() if not moved]
    if len(still) == len(told) and any(seen.varied.values()) and (seen.rewarded or seen.ends):
        got = f"the same after each of {seen.chunks} chunks as after the reset"
        expected = f"{' or '.join(still)} to show what was done"
        player.expect(False, "chunk_step", expected, got, "observe after the last action")
    else:
        for what in still:
            player.notice(f"not seen: a change of {what} by actions")
    for name, (low, high) in seen.levels.items():
        if (low, high) == (0, 1):
            remedy = "multiply by 255 before the conversion"
            player.expect(False, f"image {name!r}", "values from 0 to 255", "nothing above 1", remedy)
        elif low == high:
            player.notice(f"not seen: anything in the images of camera {name!r}; all pixels are {low}")


def chosen_scripts(player: Player, length: int) -> dict[int, Script]:
    """One for each row, from states that differ where there are enough."""
    states = spread(player.splits["train"])
    rows = [int(row) for row in player.rows]
    kinds = ("random", "extreme", "slowly changing")
    return {r: player.script(states[r % len(states)].id, kinds[r % 3], length, key=r) for r in rows}


def shortest_limit(player: Player) -> int:
    """Of the states that `chosen_scripts` takes."""
    states = spread(player.splits["train"])[: len(player.rows)]
    return int(np.min([player.limit(state.id) for state in states]))
