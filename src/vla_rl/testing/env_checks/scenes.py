"""Initial states: can every one be entered, is an id a scene, and do the splits share none?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from time import perf_counter

import numpy as np
from attrs import evolve

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array, ResetState, to_numpy
from vla_rl.testing.common.findings import LeftOut, Unfit
from vla_rl.testing.env_checks.player import KEYED, FirstFrames, Player, spread_out
from vla_rl.testing.env_checks.repeats import measure_chance
from vla_rl.testing.env_checks.traces import EXACT, EnvView, describe_difference, describe_gap, region_gaps

SHARES = {"eval": (0.04, 0.15), "train": (0.02, 0.08)}
"""Shares of the time for each split: after the first, `FEW` states are enough; after the second, any number is."""
FEW = 100
SMALL_SEEDS = 2**31
FAILURES = 3
"""Number of states that cannot be entered after which the others are skipped."""
SCENES = 6
"""Number of states that are checked for changes with the seed."""
AGAIN = 4
"""Number of states of a split that are entered twice."""
PAIRS = 8
"""Number of pairs of similar states whose episodes are compared."""


def check_first_contact(player: Player) -> None:
    """Before any other call: one env is used, and the others have never been reset. With seeds as large as a run's."""
    last, state = player.env_ids[-1], player.splits["train"][0].id
    try:
        player.reset_envs([last], [state], [player.derive_seed(state)])
    except Exception as exc:
        if player.hopeless:
            raise
        player.seed_limit = SMALL_SEEDS
        try:
            player.reset_envs([last], [state], [player.derive_seed(state)])
        except Exception:
            raise exc from None
        got = f"{type(exc).__name__}: {exc}"
        player.expect(False, "reset", "seeds up to 2**63 - 1 to be taken", got, "take a seed modulo what you can use")
    unfit = [stop for stop in (True, False) if not _step_one(player, last, state, stop)]
    if unfit:
        raise Unfit


def _step_one(player: Player, env_id: int, state: int, stop: bool) -> bool:
    """Step one env, while the others may never have been reset. Return whether the results are valid for comparison."""
    script, every = player.make_script(state, "random", player.chunk), player.env_ids
    try:
        player.roll_out({env_id: script}, stop=stop)
    except Unfit:
        return False
    except Exception as exc:
        if len(every) == 1:
            raise
        player.reset_envs(every, [state] * len(every), [player.derive_seed(state)] * len(every))
        player.roll_out({env_id: script}, stop=stop)
        expected, got = "envs that have never been reset to be left alone", f"{type(exc).__name__}: {exc}"
        player.expect(False, "chunk_step", expected, got, "core leaves envs idle where it has fewer episodes than envs")
    return True


def check_states(player: Player) -> None:
    """Reset every state, or as many as time allows, well spread. Those that cannot be entered are left out."""
    for split in ("eval", "train"):
        began, states = perf_counter(), player.splits[split]
        soon, late = (share * player.seconds for share in SHARES[split])
        entered: list[ResetState] = []
        failed: dict[int, str] = {}
        for batch in _spread_batches(states, len(player.env_ids)):
            spent, limit = perf_counter() - began, soon if len(entered) >= FEW else late
            if player.hopeless or (entered and (spent > limit or len(failed) >= FAILURES)):
                break
            failed |= _enter_batch(player, split, batch, len(entered))
            entered += batch
        for error in dict.fromkeys(failed.values()):
            ids = ", ".join(str(state) for state, text in failed.items() if text == error)
            expected = f"reset: expected {split} state {ids} to be entered"
            player.findings.record_error(expected, error, "fix what raises it")
        if len(entered) < len(states) and not player.hopeless:
            tasks, entered_tasks = ({state.task for state in several} for several in (states, entered))
            of_tasks = f" ({len(entered_tasks)} of {len(tasks)} tasks)" if len(tasks) > 1 else ""
            player.notice(f"not seen: all {split} states; entered {len(entered)} of {len(states)}{of_tasks}")
        player.splits[split] = tuple(s for s in states if s.id not in failed) if _starts_of(player, split) else ()


def _starts_of(player: Player, split: str) -> list[FirstFrames]:
    return [start for start in player.record.starts.values() if start.split == split]


def _enter_batch(player: Player, split: str, batch: Sequence[ResetState], entered: int) -> dict[int, str]:
    """Enter the states, where so many others were entered. Return the error of each that cannot be entered."""
    env_ids = np.roll(player.env_ids, entered)[: len(batch)]
    ids = [state.id for state in batch]
    try:
        env_views = player.reset_envs(env_ids, ids, [player.derive_seed(0)] * len(ids))
        error = "\n".join(player.broken)  # an env may have been tried again, or show what it showed before
    except (Unfit, LeftOut):
        raise
    except Exception as exc:
        error = f"{type(exc).__name__}: {str(exc).strip()}"
    if error and (len(batch) == 1 or player.hopeless):
        return {ids[0]: error}
    failed: dict[int, str] = {}
    for state in batch if error else ():
        failed |= {} if player.hopeless else _enter_batch(player, split, [state], entered)
    for count, (state_id, view) in enumerate(zip(ids, env_views, strict=True) if not error else (), entered):
        kept = view if count < AGAIN else None
        player.record.starts[state_id] = FirstFrames(state_id, split, view.view_hash, view.state, kept)
    return failed


def check_scenes(player: Player) -> None:
    """Compare the first observations of states, with others and with themselves."""
    measure_chance(player)
    if not player.info.fixed_states:
        player.notice("not done: EnvInfo.fixed_states says that a person arranges the scenes")
        return
    _enter_again(player)
    _scenes_follow_ids(player)
    _splits_apart(player)


def _enter_again(player: Player) -> None:
    """States that were entered before, the other way round and in the last env, are the same scenes."""
    for start in reversed([start for start in player.record.starts.values() if start.view is not None]):
        (view,) = player.reset_envs(player.env_ids[-1:], [start.state], [player.derive_seed(0)])
        deviation = describe_gap(start.view, view, player.slack) if start.view else ""
        got = f"{deviation} ({start.split} state {start.state})"
        expected = "equal observations when a state is entered again with the same seed"
        player.expect(not deviation, "reset", expected, got, KEYED)


def _scenes_follow_ids(player: Player) -> None:
    """Check that another id gives another scene for one seed, and that an id gives the same scene for other seeds."""
    of_train = _starts_of(player, "train")
    differ = len(of_train) < 2 or len({start.mark for start in of_train}) > 1
    got = f"the same for {len(of_train)} states"
    player.expect(differ, "reset", "another observation for another state id", got, "use state_ids")
    ids = [state.id for state in _of_one_task(player.splits["train"])[: 2 if player.is_slow else SCENES]]
    if len(ids) < 2:
        player.notice("not seen: whether another state id is another scene; there is only one train state")
        return
    one, two = (
        [player.reset_envs([0], [state], [player.derive_seed(key)])[0] for state in ids]  # one after the other
        for key in (1, 2)
    )
    if not any(describe_gap(a, b, EXACT) for a, b in zip(one, two, strict=True)):
        return
    by_seed = np.mean([_view_distances(a, b) for a, b in zip(one, two, strict=True)], axis=0)
    by_state = np.mean([_view_distances(a, b) for a, b in zip(one, one[1:] + one[:1], strict=True)], axis=0)
    worst = int(np.argmin(by_seed - by_state))
    got = f"first observations that differ by {by_seed[worst]:.2g} between seeds, and by {by_state[worst]:.2g} between"
    remedy = "the id alone says where an episode starts; the seed keys what else is random"
    fixed = bool((by_seed < 0.5 * by_state).any())
    player.expect(fixed, "reset", "the same scene for the same state id, whatever the seed", f"{got} ids", remedy)


def _of_one_task(states: Sequence[ResetState]) -> list[ResetState]:
    """Return the states of the task that has most of them."""
    commonest = Counter(state.task for state in states).most_common(1)[0]
    return spread_out([state for state in states if commonest[1] < 2 or state.task == commonest[0]])


def _splits_apart(player: Player) -> None:
    """Scenes of the eval split that start as one of the train split, and run as it, are the same scene."""
    train = {start.mark: start for start in reversed(_starts_of(player, "train"))}
    evals = _starts_of(player, "eval")
    pairs = [(train[start.mark].state, start.state) for start in evals if start.mark in train]
    same_scenes = [pair for pair in spread_out(pairs)[:PAIRS] if not _states_differ(player, *pair)]
    if not same_scenes:
        return
    ids = ", ".join(f"{other} as {one}" for one, other in same_scenes[:4])
    if len({start.mark for start in evals}) == len(evals) or len(pairs) >= 0.9 * len(evals):
        got = f"{len(pairs)} of {len(evals)} eval states that start as a train state, and run as it: {ids}"
        player.expect(False, "reset_states", "scenes that differ between train and eval", got, "draw them apart")
    else:
        player.notice(
            f"not seen: whether eval and train scenes differ where they look alike ({ids}); "
            "states of one split look alike too"
        )


def _states_differ(player: Player, one: int, two: int) -> bool:
    """Return whether two states that look alike differ in the expert's actions or in the results of actions."""
    length = min(player.step_limit(one), player.step_limit(two), player.chunk * player.affordable_chunks(0.01, 6, 64))
    for kind in ("random", "extreme", "held random"):
        scripts = [
            evolve(player.make_script(one, kind, length), state=s, seed=player.derive_seed(0)) for s in (one, two)
        ]
        advice: list[Array] = []

        def ask_expert(index: int, answers: list[Array] = advice) -> None:
            answers.extend([_expert_chunk(player)] if index == 0 else [])

        a, b = (player.roll_out({0: script}, between=ask_expert)[0] for script in scripts)
        if describe_difference(a, b, EXACT) or not np.array_equal(advice[0], advice[1]):
            return True
    return False


def _expert_chunk(player: Player) -> Array:
    try:
        advice: Array = np.array(to_numpy(player.env.expert_chunk()))[0]
    except UserError:
        return np.zeros(0)
    return advice


def _view_distances(one: EnvView, two: EnvView) -> list[float]:
    """Return the distances of the images (by regions, against single-pixel noise) and of the states."""
    parts = [float(region_gaps(one, two, name).mean()) for name in one.images]
    if one.state is not None and two.state is not None:
        parts.append(float(np.abs(one.state - two.state).mean()))
    return parts


def _spread_batches(states: Sequence[ResetState], size: int) -> Iterator[list[ResetState]]:
    """Parts of `size` states of one task: tasks in turn, and within each the first, the last, and then always where the
    gaps are widest."""
    by_task: dict[str, list[ResetState]] = defaultdict(list)
    for state in states:
        by_task[state.task].append(state)
    orders = [spread_out(of_task) for of_task in by_task.values()]
    parts = ([order[i : i + size] for i in range(0, len(order), size)] for order in orders)
    return (part for turn in zip_longest(*parts) for part in turn if part)
