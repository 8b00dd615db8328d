"""Ends: does an env stop there, wherever it falls in a chunk, and show the episode that ended?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve

from vla_rl.testing.common.findings import LeftOut
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.repeats import NOT_TWICE, NOTHING_SHARED, pair_up, turn_envs
from vla_rl.testing.env_checks.traces import EnvTrace, EnvView

STOP = "execute nothing after the end of an episode, and show what it ended with"
FEWEST = 2
"""Minimal number of re-runs of an ended episode, regardless of time."""
LONGEST = 400
"""Longest episode, in actions, that is re-run to its end, unless there is no shorter one."""


def check_ends(player: Player) -> None:
    """Play episodes that ended again: action by action, with other actions after the end, with the end at other places
    of a chunk, running on, in other envs."""
    if not player.record.repeated:
        raise LeftOut(NOT_TWICE)
    if player.info.chunk_is_one_motion:
        raise LeftOut("EnvInfo.chunk_is_one_motion says that chunks cut at other places lead elsewhere")
    sets = _choose_traces(player, player.record.ended)
    if not sets:
        raise LeftOut("not seen: an end")
    for index, first in enumerate(sets):
        calls = max(len(trace) for trace in first.values()) // player.chunk + 1
        room = player.affordable_chunks(0.25, len(sets), 6 * calls) // calls
        if index and room < FEWEST:
            player.notice("not repeated: ends of every kind, for want of time")
            break
        _repeat_episodes(player, first, room)


def _repeat_episodes(player: Player, first: Mapping[int, EnvTrace], room: int) -> None:
    """Play episodes that ended, and one more chunk, in as many ways as there is room for."""
    scripts, others, chunk = {}, {}, player.chunk
    for env_id, trace in first.items():
        more = player.make_script(trace.script.state, "random", chunk, key=env_id + 100).actions
        farther = np.where(more > (player.low + player.high) / 2, player.low, player.high)
        until = trace.script.actions[: len(trace)]
        scripts[env_id], others[env_id] = (
            evolve(trace.script, actions=np.concatenate([until, tail])) for tail in (more, farther)
        )
    lengths = [len(trace) for trace in first.values()]
    by_chunks = (min(lengths) - 1) // chunk
    singly = player.roll_out(scripts, widths=[chunk] * by_chunks + [1] * (max(lengths) - by_chunks * chunk))
    expected = "the same end in a chunk as with single actions"
    player.expect_same(pair_up(first, singly), expected, STOP, player.loose)
    _check_final_views(player, singly)
    pairs = pair_up(first, player.roll_out(others, stop=False))
    expected = "stop_at_end=False to change nothing up to the end"
    player.expect_same(pairs, expected, STOP, player.loose, as_far_as_both=True)
    for place in sorted({0, chunk - 1, chunk // 2})[: max(room - 2, 0)]:
        before = lengths[place % len(lengths)] - 1 - place  # actions before the chunk with the end at this place
        widths = [chunk] * (before // chunk) + [before % chunk] * (before % chunk > 0) if before >= 0 else []
        pairs = pair_up(first, player.roll_out(others, widths=widths))
        expected = "the same end wherever it falls in a chunk, and whatever comes after it"
        player.expect_same(pairs, expected, STOP, player.loose)
    if room > 5 and len(player.env_ids) > 1:
        pairs = pair_up(first, turn_envs(player, scripts))
        player.expect_same(pairs, "the same end in another env", NOTHING_SHARED, player.loose)


def _choose_traces(player: Player, ended: Sequence[EnvTrace]) -> list[dict[int, EnvTrace]]:
    """Sets of one for each env that it ran in, until every kind of end that was seen is among them; the shorter
    ones first that are longer than a chunk."""
    ordered = sorted(ended, key=lambda t: (len(t) > LONGEST, len(t) <= player.chunk, len(t)))
    kinds: set[tuple[bool, bool]] = set()
    sets: list[dict[int, EnvTrace]] = []
    while kinds < {_end_kind(trace) for trace in ended}:
        chosen: dict[int, EnvTrace] = {}
        for env_id in player.env_ids:
            candidates = [trace for trace in ordered if trace.env_id == env_id]
            missing = [trace for trace in candidates if _end_kind(trace) not in kinds]
            for trace in (missing or candidates)[:1]:
                chosen[env_id] = trace
                kinds.add(_end_kind(trace))
        sets.append(chosen)
    return sets


def _end_kind(trace: EnvTrace) -> tuple[bool, bool]:
    return trace.has_won, trace.steps[-1].truncated


def _check_final_views(player: Player, traces: Mapping[int, EnvTrace]) -> None:
    """A final observation is not where an episode starts."""
    starts = player.record.starts.values()
    state_of_mark = {start.mark: start.state for start in starts}
    marks_differ = len(state_of_mark) == len(starts)
    for trace in traces.values():
        end = trace.end_or_length
        final, before, initial = trace.views.get(end), trace.views.get(end - 1), trace.views[0]
        if final is None or before is None or not final.images or not before.images:
            continue
        state = trace.script.state if final.view_hash == initial.view_hash else state_of_mark.get(final.view_hash)
        state = state if marks_differ else None
        stands_still = before.view_hash in (final.view_hash, initial.view_hash)
        if stands_still or (state is None and not _leaps_back(player, final, before)):
            continue
        got = "where an episode starts" if state is None else f"what state {state} starts with"
        remedy = "do not start the next episode by yourself: core resets envs"
        expected = "the final observation of the episode that ended"
        player.expect(False, "chunk_step", expected, f"{got} ({trace}, ended by action {end})", remedy)


def _leaps_back(player: Player, final: EnvView, before: EnvView) -> bool:
    """Return whether the last action moves the state back to the initial states, farther than any action before."""
    numbers = [start.numbers for start in player.record.starts.values() if start.numbers is not None]
    if not numbers or player.record.stride is None or final.state is None or before.state is None:
        return False
    low, high = np.min(numbers, axis=0) - 1e-3, np.max(numbers, axis=0) + 1e-3
    outside = np.maximum(low - before.state, before.state - high)
    like_a_start = bool(((final.state >= low) & (final.state <= high)).all())
    return like_a_start and bool((outside > 1.2 * player.record.stride + 1e-3).any())
