"""Does the same state, seed and actions give the same episode? Again, in other envs, alone, next to envs that are
reset, in other chunks, after a restore: whatever came before and whatever neighbours do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
from attrs import evolve

from vla_rl.core.capabilities import Offloadable, require_capability
from vla_rl.core.errors import UserError
from vla_rl.core.manager import unwrap_component, wrap
from vla_rl.core.types import to_numpy
from vla_rl.testing.common.findings import LeftOut
from vla_rl.testing.env_checks.experts import ask_expert
from vla_rl.testing.env_checks.player import KEYED, PIXELS, Player
from vla_rl.testing.env_checks.traces import EnvTrace, Script, Slack, describe_difference, image_gap
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

EXACT_PIXELS = 0.02
"""Mean difference of images that is tolerated where the renderer repeats itself: an edge that rounding moved."""
LOOSE_PIXELS = 0.1
"""The same, where calls differ: a controller may add a little to what each call asks for."""
LOOSE_MOVES = 2e-3
"""Tolerated difference of a number where calls differ, as a share of its change by a chunk."""
REPETITIONS = 16
"""Approximate number of replays."""
NOT_TWICE = "not done: it needs episodes that come twice alike; see determinism"
DRIFT = 1e-2
"""Differences up to here that begin late are taken for rounding that grew."""
NOTHING_SHARED = "let envs share nothing, random generators included, and let nothing hang on an env's number"
RESET_ALL = f"reset all that an episode changes, and {KEYED}"

Traces = Mapping[int, EnvTrace]


def pair_up(first: Traces, again: Traces) -> list[tuple[EnvTrace, EnvTrace]]:
    """Traces of the same env."""
    return [(first[env_id], trace) for env_id, trace in again.items()]


def turn_envs(player: Player, scripts: Mapping[int, Script]) -> dict[int, EnvTrace]:
    """Run each script in the next env. Return the traces by the env whose script it is."""
    count = len(player.env_ids)
    turned = player.roll_out({(env_id + 1) % count: script for env_id, script in scripts.items()})
    return {(env_id - 1) % count: trace for env_id, trace in turned.items()}


# ------------------------------------------------------------------------------------------------------- again


def measure_chance(player: Player) -> None:
    """Measure how far apart episodes of other seeds are. If the seed matters, random draws may also depend on the
    number of calls; then comparisons between different sequences of calls are as coarse as this distance."""
    limit = player.shortest_limit
    scripts = player.make_scripts(min(limit, player.chunk * player.affordable_chunks(0.05, 3, limit)))
    first = player.roll_out(scripts)
    baseline = loose = Slack(player.slack.pixels, max(player.slack.numbers, LOOSE_MOVES * _smallest_move(first)))
    for key in (1, 2):
        seeds = {env_id: player.derive_seed(s.state + key + 10**6) for env_id, s in scripts.items()}
        other = player.roll_out({env_id: evolve(s, seed=seeds[env_id]) for env_id, s in scripts.items()})
        for pair in pair_up(first, other):
            pixels, numbers = _view_gaps(*pair)
            loose = Slack(max(loose.pixels, 2 * pixels), max(loose.numbers, 2 * numbers))
        if loose == baseline:
            break
    player.loose = loose


def check_determinism(player: Player) -> None:
    """The same states, seeds and actions give the same episodes, whatever ran in between."""
    if not player.info.deterministic:
        player.notice("not done: EnvInfo.deterministic says that episodes do not come twice alike")
        return
    limit = player.shortest_limit
    length = min(limit, player.chunk * player.affordable_chunks(0.3, REPETITIONS, -(-limit // player.chunk)))
    scripts = player.make_scripts(length)
    first, again = player.roll_out(scripts), player.roll_out(scripts)
    late = _find_drift(player, first, again)
    if late:
        player.notice(f"not compared: episodes after {late} actions; rounding makes them differ from there on")
        scripts = {env_id: evolve(s, actions=s.actions[:late]) for env_id, s in scripts.items()}
        first, again = player.roll_out(scripts), player.roll_out(scripts)
    elif length < limit:
        player.notice(f"not seen: whole episodes; compared {length} of up to {limit} actions, for want of time")
    expected = "equal observations for equal state ids and actions"
    if not player.expect_same(pair_up(first, again), expected, KEYED):
        return
    gap = max(_view_gaps(*pair)[0] for pair in pair_up(first, again))
    if gap > EXACT_PIXELS:
        player.notice(f"images of the same differ by up to {gap:.2g} of 255 on average")
    else:  # compare images more closely from here on
        if player.loose.pixels == player.slack.pixels:
            player.loose = evolve(player.loose, pixels=LOOSE_PIXELS)
        player.slack = evolve(player.slack, pixels=EXACT_PIXELS)
    others = [evolve(s, actions=s.actions[::-1].copy()) for s in scripts.values()]
    player.roll_out(dict(enumerate(others[1:] + others[:1])), stop=False)
    once_more, expected = pair_up(first, player.roll_out(scripts)), "the same episode again after other ones"
    if player.record.earliest and not late:
        earliest = player.record.earliest
        once_more += pair_up(earliest, player.roll_out({env_id: trace.script for env_id, trace in earliest.items()}))
    if player.expect_same(once_more, expected, RESET_ALL):
        player.record.repeated = first


def _find_drift(player: Player, first: Traces, again: Traces) -> int:
    """The number of actions up to which episodes are equal, where they drift apart later and slowly; else 0."""
    horizons = []
    for one, two in pair_up(first, again):
        if not describe_difference(one, two, player.slack):
            continue
        good = [t for t in sorted(one.views) if not describe_difference(one, two, player.slack, t)]
        reach = good[-1] if good else 0
        drifted = Slack(PIXELS + 2, DRIFT)
        if reach < 3 * player.chunk or describe_difference(one, two, drifted, reach + player.chunk):
            return 0
        horizons.append(reach)
    return min(horizons, default=0)


def _smallest_move(traces: Traces) -> float:
    """Return by how much a chunk changes the state number that it changes least; 0 if it changes none."""
    states = [[trace.views[t].state for t in sorted(trace.views)] for trace in traces.values()]
    moves = [np.abs(b - a) for of_env in states for a, b in pairwise(of_env) if a is not None and b is not None]
    largest = np.max(moves, axis=0) if moves else np.zeros(0)
    return float(np.min(largest[largest > 0])) if (largest > 0).any() else 0.0


def _view_gaps(one: EnvTrace, two: EnvTrace) -> tuple[float, float]:
    """Largest differences of two traces: of images on average, of 255, and of a number of the state."""
    pairs = [(one.views[t], two.views[t]) for t in one.views if t in two.views]
    pixels = [image_gap(a, b, name) for a, b in pairs for name in a.images]
    numbers = [float(np.abs(a.state - to_numpy(b.state)).max()) for a, b in pairs if a.state is not None]
    return max(pixels, default=0.0), max(numbers, default=0.0)


# -------------------------------------------------------------------------------------------------- neighbours


def check_envs_apart(player: Player) -> None:
    """Check that an env's results depend neither on its number nor on the other envs."""
    scripts, first, count = _repeated_scripts(player), player.record.repeated, len(player.env_ids)
    if count < 2:
        raise LeftOut("there is one env only")
    expected = "the same episode in another env, and observations in the order of `env_ids`"
    player.expect_same(pair_up(first, turn_envs(player, scripts)), expected, NOTHING_SHARED)
    same = player.roll_out(dict.fromkeys(scripts, scripts[0]))
    expected = "the same episode in envs that run the same state, seed and actions"
    player.expect_same([(first[0], trace) for trace in same.values()], expected, NOTHING_SHARED)
    for env_id in (0, count - 1):
        waiting = {other: script for other, script in scripts.items() if other != env_id}
        alone = player.roll_out({env_id: scripts[env_id]}, waiting=waiting)
        player.expect_same(pair_up(first, alone), f"env {env_id} alone as with others", NOTHING_SHARED)


def check_resets_of_others(player: Player) -> None:
    """Resets of other envs and calls without an active env change nothing."""
    scripts, first, count = _repeated_scripts(player), player.record.repeated, len(player.env_ids)
    widths, middle = _in_parts(player, first)
    for env_id in (0, count - 1) if count > 1 else ():
        other = (env_id + 1) % count
        traces = player.roll_out(scripts, widths=widths, restart=(middle, env_id, scripts[other]))
        restarted = traces.pop(env_id)
        expected, remedy = "the other envs untouched by the reset of an env", "reset only the envs that are asked for"
        player.expect_same(pair_up(first, traces), expected, remedy, player.loose, where="reset")
        if restarted.script is scripts[other]:
            pair, expected = (first[other], restarted), "the same episode when it starts while other envs continue"
            player.expect_same([pair], expected, RESET_ALL, player.loose, as_far_as_both=True)
    inactive = np.zeros(count, bool)

    def step_idle(index: int) -> None:
        for stop in (True, False):
            player.step_envs(np.tile(player.high, (count, player.chunk, 1)), inactive, stop)

    idle = player.roll_out(scripts, between=step_idle)
    expected, remedy = "no change by a call without active envs", "skip envs that are not active"
    player.expect_same(pair_up(first, idle), expected, remedy, player.loose)


def check_expert_apart(player: Player) -> None:
    """Asking the expert has no effect on the envs."""
    traces = player.roll_out(_repeated_scripts(player), between=lambda index: ask_expert(player))
    expected, remedy = "no effect on the envs", "work it out on copies, and put back what it moves"
    pairs = pair_up(player.record.repeated, traces)
    player.expect_same(pairs, expected, remedy, player.loose, where="expert_chunk")


def check_envs_of_one_process(player: Player) -> None:
    """Envs that take turns in a process run as each does in its own (`processes: {envs_per_process: ...}`)."""
    env = unwrap_component(player.env)
    if not isinstance(env, SubprocEnvs) or not env.has_own_processes or len(player.env_ids) < 2:
        raise LeftOut("envs do not live in separate processes")
    scripts = _repeated_scripts(player)
    if player.started_in > 0.1 * player.seconds:
        player.notice(f"not seen: envs that share a process; they take {player.started_in:.0f} s to start")
        return
    try:
        with player.other_env(wrap("env", env.in_one_process(), "envs of one process")):
            traces = player.roll_out(scripts)
    except UserError as exc:
        player.notice(f"not done: envs that share a process; {exc}")
        return
    expected = "the same episodes in envs that share a process (processes: {envs_per_process: 2})"
    remedy = f"{NOTHING_SHARED}; module-level variables are shared too"
    player.expect_same(pair_up(player.record.repeated, traces), expected, remedy)


# ------------------------------------------------------------------------------------------------ chunks, restores


def check_chunks(player: Player) -> None:
    """A chunk does what its actions do one after the other; shorter chunks are applied too."""
    scripts, first = _repeated_scripts(player), player.record.repeated
    if player.info.chunk_is_one_motion:
        player.notice("chunks of other lengths: EnvInfo.chunk_is_one_motion says that they lead elsewhere")
    elif player.chunk > 1:
        mixed = player.roll_out(scripts, widths=[1, player.chunk, max(player.chunk - 1, 1), max(player.chunk // 2, 1)])
        expected = "the same episode with chunks of other lengths"
        remedy = "apply every action of a chunk, in order, and report what each led to"
        player.expect_same(pair_up(first, mixed), expected, remedy, player.loose)
    pairs = pair_up(first, player.roll_out(scripts, stop=False))
    expected, remedy = "up to an end the same with stop_at_end=False", "stop_at_end changes nothing before the end"
    player.expect_same(pairs, expected, remedy, as_far_as_both=True)


def check_offload(player: Player) -> None:
    """Check that a restored simulator continues as the first time, if it is `Offloadable`."""
    scripts, first, env = _repeated_scripts(player), player.record.repeated, player.env
    (widths, middle), another = _in_parts(player, first), player.options.make_env
    if not isinstance(env, Offloadable):
        raise LeftOut(f"{env.__class__.__name__} does not inherit vla_rl.Offloadable")
    if widths[0] != player.chunk:  # the same calls but for the restore: rounding is the same too
        length = widths[0] * middle + 2 * player.chunk
        scripts = {env_id: evolve(s, actions=s.actions[:length]) for env_id, s in scripts.items()}
        first = player.roll_out(scripts, widths=widths)
    with ExitStack() as others:

        def restore_midway(index: int) -> None:
            if index != middle:
                return
            saved, statuses = env.snapshot(), list(player.statuses)
            seeds = {env_id: player.derive_seed(env_id + 7) for env_id in scripts}
            short = {e: evolve(s, seed=seeds[e], actions=s.actions[: 2 * player.chunk]) for e, s in scripts.items()}
            player.roll_out(short, stop=False)
            if another is not None:
                others.enter_context(player.other_env(another()))
            require_capability(player.env, Offloadable, "check_env").restore(saved)
            player.statuses = statuses

        traces = player.roll_out(scripts, widths=widths, between=restore_midway)
    expected, remedy = "the same step after a restore", "save all that a step changes"
    player.expect_same(pair_up(first, traces), expected, remedy, where="restore")


def _repeated_scripts(player: Player) -> dict[int, Script]:
    if not player.record.repeated:
        raise LeftOut(NOT_TWICE)
    return {env_id: trace.script for env_id, trace in player.record.repeated.items()}


def _in_parts(player: Player, first: Traces) -> tuple[list[int], int]:
    """Lengths of chunks such that no episode ends with the first one, and the number of one in the middle."""
    shortest = min(len(trace) for trace in first.values())
    width = player.chunk if player.info.chunk_is_one_motion else min(player.chunk, max(1, shortest // 2))
    longest = max(len(trace.script) for trace in first.values())
    return [width] * -(-longest // width), min(max(1, shortest // width // 2), shortest - 1)
