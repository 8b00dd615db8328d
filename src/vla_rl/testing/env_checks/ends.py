"""Checks at an end: the env stops there, wherever it falls in a chunk, and shows the episode that ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve

from vla_rl.core.types import Array
from vla_rl.testing.common.findings import LeftOut
from vla_rl.testing.env_checks.arrangements import NOT_TWICE, NOTHING_SHARED
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.scenes import StartChecks
from vla_rl.testing.env_checks.traces import EnvTrace, EnvView, Script, describe_difference

STOP = "execute nothing after the end of an episode, and show what it ended with"
FEWEST = 2
"""Minimal number of re-runs of an ended episode, regardless of time."""
LONGEST = 400
"""Longest episode, in actions, that is re-run to its end, unless there is no shorter one."""


def check_ends(player: Player, ended: Sequence[EnvTrace], starts: StartChecks, repeats: bool) -> None:
    """Play episodes that ended again: action by action, with other actions after the end, with the end at other places
    of a chunk, running on, in other envs.

    Args:
        repeats: whether the same episode comes twice.
    """
    if not repeats:
        raise LeftOut(NOT_TWICE)
    if player.info.chunk_is_one_motion:
        raise LeftOut("EnvInfo.chunk_is_one_motion says that chunks cut at other places lead elsewhere")
    sets = _choose_traces(player, ended)
    if not sets:
        raise LeftOut("not seen: an end")
    for index, first in enumerate(sets):
        room = _affordable_repeats(player, first, len(sets))
        if index and room < FEWEST:
            player.notice("not repeated: ends of every kind, for want of time")
            break
        _repeat_episodes(player, first, starts, room)


def _affordable_repeats(player: Player, first: Mapping[int, EnvTrace], sets: int) -> int:
    """Return the number of re-runs that the time allows, 6 at most."""
    calls = max(_end_or_length(trace) for trace in first.values()) // player.chunk + 1
    return player.affordable_chunks(0.25, sets, 6 * calls) // calls


def _repeat_episodes(player: Player, first: Mapping[int, EnvTrace], starts: StartChecks, room: int) -> None:
    scripts = {env_id: _script_past_end(player, trace, env_id) for env_id, trace in first.items()}
    others = {
        env_id: evolve(s, actions=_other_tail(player, s.actions, _end_or_length(first[env_id])))
        for env_id, s in scripts.items()
    }
    near = min(_end_or_length(trace) for trace in first.values())
    by_chunks = (near - 1) // player.chunk
    widths = [player.chunk] * by_chunks + [1] * (
        max(_end_or_length(t) for t in first.values()) - by_chunks * player.chunk
    )
    singly = player.roll_out(scripts, widths=widths)
    _compare_ends(player, first, singly, "the same end in a chunk as with single actions")
    _of_the_ended_episode(player, singly, starts)

    on = player.roll_out(others, stop=False)
    for env_id, trace in first.items():
        _compare_ends(
            player,
            {env_id: trace},
            {env_id: on[env_id]},
            "stop_at_end=False to change nothing up to the end",
            _end_or_length(trace),
        )
    env_ids = list(first)
    for place in sorted({0, player.chunk - 1, player.chunk // 2})[: max(room - 2, 0)]:
        env_id = env_ids[place % len(env_ids)]
        widths = _to_place(player, _end_or_length(first[env_id]), place)
        moved = player.roll_out(others, widths=widths)
        _compare_ends(player, first, moved, "the same end wherever it falls in a chunk, and whatever comes after it")
    if room > 5 and len(player.env_ids) > 1:
        count = len(player.env_ids)
        turned = player.roll_out({(env_id + 1) % count: script for env_id, script in scripts.items()})
        _compare_ends(
            player,
            first,
            {env_id: turned[(env_id + 1) % count] for env_id in first},
            "the same end in another env",
            None,
            NOTHING_SHARED,
        )


def _compare_ends(
    player: Player,
    first: Mapping[int, EnvTrace],
    collected: Mapping[int, EnvTrace],
    expected: str,
    upto: int | None = None,
    remedy: str = STOP,
) -> None:
    """Up to the end, which is where envs stop."""
    for env_id, trace in first.items():
        end = _end_or_length(trace)
        deviation = describe_difference(trace, collected[env_id], player.loose, end if upto is None else upto)
        if not deviation and upto is None and len(collected[env_id]) != end:
            deviation = f"after {len(collected[env_id])} executed actions instead of {end}"
        got = f"{deviation} (env {collected[env_id].env_id}, {trace.script}, ended by action {end})"
        player.expect(not deviation, "chunk_step", expected, got, remedy)


def _choose_traces(player: Player, ended: Sequence[EnvTrace]) -> list[dict[int, EnvTrace]]:
    """Sets of one for each env that it ran in, until every kind of end that was seen is among them; the shorter
    ones first that are longer than a chunk."""
    ordered = sorted(
        ended, key=lambda t: (_end_or_length(t) > LONGEST, _end_or_length(t) <= player.chunk, _end_or_length(t))
    )
    kinds: set[tuple[bool, bool]] = set()
    sets: list[dict[int, EnvTrace]] = []
    while kinds < {_end_kind(trace) for trace in ended}:
        chosen: dict[int, EnvTrace] = {}
        for env_id in (int(env_id) for env_id in player.env_ids):
            candidates = [trace for trace in ordered if trace.env_id == env_id]
            missing = [trace for trace in candidates if _end_kind(trace) not in kinds]
            for trace in (missing or candidates)[:1]:
                chosen[env_id] = trace
                kinds.add(_end_kind(trace))
        sets.append(chosen)
    return sets


def _end_kind(trace: EnvTrace) -> tuple[bool, bool]:
    return trace.has_won, trace.truncated[_end_or_length(trace) - 1]


def _script_past_end(player: Player, trace: EnvTrace, env_id: int) -> Script:
    """Return the trace's script up to the end, plus one chunk."""
    more = player.make_script(trace.script.state, "random", player.chunk, key=env_id + 100).actions
    return evolve(trace.script, actions=np.concatenate([trace.script.actions[: _end_or_length(trace)], more]))


def _other_tail(player: Player, actions: Array, end: int) -> Array:
    """After the end, the bound that is farther away."""
    middle = (player.low + player.high) / 2
    tail = np.where(actions[end:] > middle, player.low, player.high)
    return np.concatenate([actions[:end], tail])


def _to_place(player: Player, end: int, place: int) -> list[int]:
    """Lengths of chunks after which the `end`-th action is at this place (from 0) of a chunk, where that can be."""
    before = end - 1 - place
    if before < 0:
        return []
    return [player.chunk] * (before // player.chunk) + [before % player.chunk] * (before % player.chunk > 0)


def _end_or_length(trace: EnvTrace) -> int:
    return trace.end_step or len(trace)


def _of_the_ended_episode(player: Player, collected: Mapping[int, EnvTrace], starts: StartChecks) -> None:
    """A final observation is not where an episode starts."""
    state_of_mark = {start.mark: start.state for start in starts.every.values()}
    marks_differ = len(state_of_mark) == len(starts.every)
    for trace in collected.values():
        end = _end_or_length(trace)
        final, before = trace.views.get(end), trace.views.get(end - 1)
        if final is None or before is None or not final.images or not before.images:
            continue
        initial = trace.views[0]
        matching_state = state_of_mark.get(final.view_hash)
        if final.view_hash == initial.view_hash:
            matching_state = trace.script.state
        if not marks_differ:
            matching_state = None
        if before.view_hash in (final.view_hash, initial.view_hash) or (
            matching_state is None and not _leaps_back(player, final, before, starts)
        ):
            continue
        got = "where an episode starts" if matching_state is None else f"what state {matching_state} starts with"
        got += f" (env {trace.env_id}, {trace.script}, ended by action {end})"
        remedy = "do not start the next episode by yourself: core resets envs"
        player.expect(False, "chunk_step", "the final observation of the episode that ended", got, remedy)


def _leaps_back(player: Player, final: EnvView, before: EnvView, starts: StartChecks) -> bool:
    """Return whether the last action moves the state back to the initial states, farther than any action before."""
    numbers = [start.numbers for start in starts.every.values() if start.numbers is not None]
    if not numbers or player.seen.stride is None or final.state is None or before.state is None:
        return False
    low, high = np.min(numbers, axis=0) - 1e-3, np.max(numbers, axis=0) + 1e-3
    outside = np.maximum(low - before.state, before.state - high)
    like_a_start = bool(((final.state >= low) & (final.state <= high)).all())
    return like_a_start and bool((outside > 1.2 * player.seen.stride + 1e-3).any())
