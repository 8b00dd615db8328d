"""The same episodes in other arrangements: again, in other envs, alone, action by action, next to envs that are reset.

An episode is a function of its state, seed and actions; so every arrangement gives the one that ran first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import define, evolve, field

from vla_rl.core.capabilities import Offloadable, require_capability
from vla_rl.core.errors import UserError
from vla_rl.core.types import to_numpy
from vla_rl.testing.common.findings import LeftOut
from vla_rl.testing.env_checks.player import KEYED, PIXELS, Player
from vla_rl.testing.env_checks.traces import EnvTrace, Script, Slack, describe_difference, image_gap
from vla_rl.testing.env_checks.wandering import chosen_scripts, shortest_limit

EXACT_PIXELS = 0.02
"""Mean difference of images that is tolerated where the renderer repeats itself: an edge that rounding moved."""
LOOSE_PIXELS = 0.1
"""The same, where calls differ: a controller may add a little to what each call asks for."""
LOOSE_MOVES = 2e-3
"""Tolerated difference of a number where calls differ, as a share of its change by a chunk."""
REPETITIONS = 16
"""Approximate number of arrangements."""
NOT_TWICE = "not done: it needs episodes that come twice alike; see determinism"
DRIFT = 1e-2
"""Differences up to here that begin late are taken for rounding that grew."""
NOTHING_SHARED = "let envs share nothing, random generators included, and let nothing hang on an env's number"
RESET_ALL = f"reset all that an episode changes, and {KEYED}"


@define(eq=False)
class Reference:
    """The first runs of the episodes, env by env."""

    scripts: dict[int, Script] = field(factory=dict)
    traces: dict[int, EnvTrace] = field(factory=dict)

    @property
    def has_episodes(self) -> bool:
        return bool(self.traces)


def check_determinism(player: Player, reference: Reference, earliest: Mapping[int, EnvTrace]) -> None:
    """The same states, seeds and actions give the same episodes, whatever ran in between.

    Args:
        earliest: episodes that ran before any others.
    """
    if not player.info.deterministic:
        player.notice("not done: EnvInfo.deterministic says that episodes do not come twice alike")
        return
    limit = shortest_limit(player)
    length = min(limit, player.chunk * player.affordable_chunks(0.3, REPETITIONS, -(-limit // player.chunk)))
    scripts = chosen_scripts(player, length)
    first = player.roll_out(scripts)
    again = player.roll_out(scripts)
    late = _find_drift(first, again, player)
    if late:
        player.notice(f"not compared: episodes after {late} actions; rounding makes them differ from there on")
        scripts = {env_id: script.cut_to(late) for env_id, script in scripts.items()}
        first, again = (player.roll_out(scripts) for _ in range(2))
    elif length < limit:
        player.notice(f"not seen: whole episodes; compared {length} of up to {limit} actions, for want of time")
    if not compare_traces(player, first, again, "equal observations for equal state ids and actions", KEYED):
        return
    _tighten_slack(player, first, again)
    others = {env_id: evolve(s, actions=s.actions[::-1].copy()) for env_id, s in scripts.items()}
    player.roll_out({env_id: others[(env_id + 1) % len(others)] for env_id in others}, stop=False)
    once_more = player.roll_out(scripts)
    expected = "the same episode again after other ones"
    repeats = compare_traces(player, first, once_more, expected, RESET_ALL)
    if earliest and not late:
        as_at_first = player.roll_out({env_id: trace.script for env_id, trace in earliest.items()})
        repeats &= compare_traces(player, earliest, as_at_first, expected, RESET_ALL)
    if repeats:
        reference.scripts, reference.traces = scripts, first


def independent_envs(player: Player, reference: Reference) -> None:
    """Check that an env's results depend neither on its number nor on the other envs."""
    scripts, first, count = _scripts_of(reference), reference.traces, len(player.env_ids)
    if count < 2:
        raise LeftOut("there is one env only")
    turned = player.roll_out({(env_id + 1) % count: script for env_id, script in scripts.items()})
    for env_id, trace in first.items():
        expected = "the same episode in another env, and observations in the order of `env_ids`"
        compare_traces(player, {env_id: trace}, {env_id: turned[(env_id + 1) % count]}, expected, NOTHING_SHARED)
    same = player.roll_out(dict.fromkeys(scripts, scripts[0]))
    for trace in same.values():
        expected = "the same episode in envs that run the same state, seed and actions"
        compare_traces(player, {0: first[0]}, {0: trace}, expected, NOTHING_SHARED)
    for env_id in (0, count - 1):
        waiting = {other: script for other, script in scripts.items() if other != env_id}
        alone = player.roll_out({env_id: scripts[env_id]}, waiting=waiting)
        compare_traces(player, first, alone, f"env {env_id} alone as with others", NOTHING_SHARED)


def check_chunks(player: Player, reference: Reference) -> None:
    """A chunk does what its actions do one after the other; shorter chunks are applied too."""
    scripts, first = _scripts_of(reference), reference.traces
    length = len(scripts[0])
    count = min(length, player.chunk * max(1, player.affordable_chunks(0.06, 1, length) // player.chunk))
    short = {env_id: script.cut_to(count) for env_id, script in scripts.items()}
    cut = {env_id: _cut_trace(trace, count) for env_id, trace in first.items()}
    remedy = "apply every action of a chunk, in order, and report what each led to"
    if player.info.chunk_is_one_motion:
        player.notice("chunks of other lengths: EnvInfo.chunk_is_one_motion says that they lead elsewhere")
    elif player.chunk > 1:
        singly = player.roll_out(short, widths=[1] * count, keep=lambda t: t % player.chunk == 0)
        expected = f"the same episode with chunks of {player.chunk} as with single actions"
        compare_traces(player, singly, cut, expected, remedy, player.loose, cut_off=True)
        widths = [1, player.chunk, max(player.chunk - 1, 1), max(player.chunk // 2, 1)]
        mixed = player.roll_out(scripts, widths=widths)
        compare_traces(player, first, mixed, "the same episode with chunks of other lengths", remedy, player.loose)
    on = player.roll_out(scripts, stop=False)
    remedy = "stop_at_end changes nothing before the end"
    for env_id, trace in first.items():
        expected = "up to an end the same with stop_at_end=False"
        compare_traces(player, {env_id: trace}, {env_id: on[env_id]}, expected, remedy, upto=_length_before_end(trace))


def independent_envs_agree(player: Player, reference: Reference) -> None:
    """Resets of other envs, calls without an active env and questions to the expert change nothing."""
    scripts, first, count = _scripts_of(reference), reference.traces, len(player.env_ids)
    widths, middle = _in_parts(player, first)
    for env_id in (0, count - 1) if count > 1 else ():
        other = scripts[(env_id + 1) % count]
        collected = player.roll_out(scripts, widths=widths, restart=(middle, env_id, other))
        expected = "the other envs untouched by the reset of an env"
        rest = {r: collected[r] for r in collected if r != env_id}
        compare_traces(
            player, first, rest, expected, "reset only the envs that are asked for", player.loose, where="reset"
        )
        expected = "the same episode when it starts while other envs continue"
        if collected[env_id].script is other:
            trace = {env_id: first[(env_id + 1) % count]}
            compare_traces(player, trace, {env_id: collected[env_id]}, expected, RESET_ALL, player.loose, cut_off=True)
    inactive = np.zeros(count, bool)

    def step_idle(index: int) -> None:
        for stop in (True, False):
            player.step_envs(np.tile(player.high, (count, player.chunk, 1)), inactive, stop)

    expected = "no change by a call without active envs"
    compare_traces(
        player,
        first,
        player.roll_out(scripts, between=step_idle),
        expected,
        "skip envs that are not active",
        player.loose,
    )


def expert_leaves_others(player: Player, reference: Reference) -> None:
    """Asking the expert has no effect on the envs."""
    scripts = _scripts_of(reference)

    def ask_expert(index: int) -> None:
        try:
            player.env.expert_chunk()
        except UserError as exc:
            raise LeftOut(str(exc)) from exc

    collected = player.roll_out(scripts, between=ask_expert)
    expected, remedy = "no effect on the envs", "work it out on copies, and put back what it moves"
    compare_traces(player, reference.traces, collected, expected, remedy, player.loose, where="expert_chunk")


def check_offload(player: Player, reference: Reference, another: Callable[[], Any] | None) -> None:
    """Check that a restored simulator continues as the first time, if it is `Offloadable`.

    Args:
        another: builds the simulator once more; none: the one that is there goes back.
    """
    scripts, uninterrupted = _scripts_of(reference), reference.traces
    (widths, middle), original_env = _in_parts(player, uninterrupted), player.env
    if not isinstance(original_env, Offloadable):
        raise LeftOut(f"{original_env.__class__.__name__} does not inherit vla_rl.Offloadable")

    if widths[0] != player.chunk:  # the same calls but for the restore: rounding is the same too
        scripts = {env_id: s.cut_to(widths[0] * middle + 2 * player.chunk) for env_id, s in scripts.items()}
        uninterrupted = player.roll_out(scripts, widths=widths)

    def restore_midway(index: int) -> None:
        if index != middle:
            return
        saved = original_env.snapshot()
        before = player.save_records()
        short = {env_id: script.cut_to(2 * player.chunk) for env_id, script in scripts.items()}
        player.roll_out(
            {env_id: evolve(s, seed=player.derive_seed(env_id + 7)) for env_id, s in short.items()}, stop=False
        )
        if another is not None:
            player.env = another()
        require_capability(player.env, Offloadable, "check_env").restore(saved)
        player.restore_records(before)

    expected = "the same step after a restore"
    try:
        collected = player.roll_out(scripts, widths=widths, between=restore_midway)
        compare_traces(player, uninterrupted, collected, expected, "save all that a step changes", where="restore")
    finally:
        if player.env is not original_env:
            player.env.close()
            player.env = original_env
            player.forget_envs()


# ------------------------------------------------------------------------------------------------------ inside


def _scripts_of(reference: Reference) -> dict[int, Script]:
    if not reference.has_episodes:
        raise LeftOut(NOT_TWICE)
    return reference.scripts


def _in_parts(player: Player, first: Mapping[int, EnvTrace]) -> tuple[list[int], int]:
    """Lengths of chunks such that no episode ends with the first one, and the number of one in the middle."""
    shortest = min(len(trace) for trace in first.values())
    width = player.chunk if player.info.chunk_is_one_motion else min(player.chunk, max(1, shortest // 2))
    longest = max(len(trace.script) for trace in first.values())
    return [width] * -(-longest // width), min(max(1, shortest // width // 2), shortest - 1)


def compare_traces(
    player: Player,
    first: Mapping[int, EnvTrace],
    collected: Mapping[int, EnvTrace],
    expected: str,
    remedy: str,
    slack: Slack | None = None,
    *,
    where: str = "chunk_step",
    upto: int | None = None,
    cut_off: bool = False,
) -> bool:
    """`cut_off`: that one of the two is shorter is not a difference."""
    equal = True
    for env_id, trace in collected.items():
        end = min(len(first[env_id]), len(trace)) if cut_off else upto
        deviation = describe_difference(first[env_id], trace, slack or player.slack, end)
        got = f"{deviation} (env {trace.env_id}, {trace.script})"
        at = "reset" if deviation.startswith("after the reset") else where
        equal &= player.expect(not deviation, at, expected, got, remedy)
    return equal


def _length_before_end(trace: EnvTrace) -> int:
    return len(trace) if trace.end_step is None else trace.end_step - 1 or 0


def _cut_trace(trace: EnvTrace, length: int) -> EnvTrace:
    lists = ("rewards", "terminated", "truncated", "succeeded", "source", "executed_actions")
    return trace if len(trace) <= length else evolve(trace, **{name: getattr(trace, name)[:length] for name in lists})


def _find_drift(first: Mapping[int, EnvTrace], again: Mapping[int, EnvTrace], player: Player) -> int:
    """The number of actions up to which episodes are equal, where they drift apart later and slowly; else 0."""
    horizons: Sequence[int] = []
    for env_id, trace in first.items():
        if not describe_difference(trace, again[env_id], player.slack):
            continue
        good = [t for t in sorted(trace.views) if not describe_difference(trace, again[env_id], player.slack, t)]
        reach = good[-1] if good else 0
        if reach < 3 * player.chunk or describe_difference(
            trace, again[env_id], Slack(PIXELS + 2, DRIFT), reach + player.chunk
        ):
            return 0
        horizons = [*horizons, reach]
    return min(horizons, default=0)


def _tighten_slack(player: Player, first: Mapping[int, EnvTrace], again: Mapping[int, EnvTrace]) -> None:
    """Compare images more closely from here on where the renderer repeats itself."""
    gaps = [_pixel_gap(first[env_id], again[env_id]) for env_id in first]
    if max(gaps) <= EXACT_PIXELS:
        if player.loose.pixels == player.slack.pixels:
            player.loose = evolve(player.loose, pixels=LOOSE_PIXELS)
        player.slack = evolve(player.slack, pixels=EXACT_PIXELS)
    else:
        player.notice(f"images of the same differ by up to {max(gaps):.2g} of 255 on average")


def measure_chance(player: Player) -> None:
    """Measure how far apart episodes of other seeds are. If the seed matters, random draws may also depend on the
    number of calls; then comparisons between different sequences of calls are as coarse as this distance."""
    limit = shortest_limit(player)
    scripts = chosen_scripts(player, min(limit, player.chunk * player.affordable_chunks(0.05, 3, limit)))
    first = player.roll_out(scripts)
    pixels, numbers = player.slack.pixels, max(player.slack.numbers, LOOSE_MOVES * _smallest_move(first))
    baseline = pixels, numbers
    for key in (1, 2):
        other = player.roll_out(
            {env_id: evolve(s, seed=player.derive_seed(s.state + key + 10**6)) for env_id, s in scripts.items()}
        )
        for env_id, trace in other.items():
            pixels = max(pixels, 2 * _pixel_gap(first[env_id], trace))
            numbers = max(numbers, 2 * _number_gap(first[env_id], trace))
        if (pixels, numbers) == baseline:
            break
    player.loose = Slack(pixels, numbers)


def _smallest_move(collected: Mapping[int, EnvTrace]) -> float:
    """Return by how much a chunk changes the state number that it changes least; 0 if it changes none."""
    states = [[trace.views[t].state for t in sorted(trace.views)] for trace in collected.values()]
    moves = [np.abs(b - a) for of_env in states for a, b in pairwise(of_env) if a is not None and b is not None]
    largest = np.max(moves, axis=0) if moves else np.zeros(0)
    return float(np.min(largest[largest > 0], initial=np.inf)) if (largest > 0).any() else 0.0


def _shared_views(one: EnvTrace, two: EnvTrace) -> list[int]:
    return [t for t in one.views if t in two.views]


def _pixel_gap(one: EnvTrace, two: EnvTrace) -> float:
    pairs = [(one.views[t], two.views[t]) for t in _shared_views(one, two)]
    return max((image_gap(a, b, name) for a, b in pairs for name in a.images), default=0.0)


def _number_gap(one: EnvTrace, two: EnvTrace) -> float:
    pairs = [(one.views[t].state, two.views[t].state) for t in _shared_views(one, two)]
    return max((float(np.abs(a - to_numpy(b)).max()) for a, b in pairs if a is not None), default=0.0)
