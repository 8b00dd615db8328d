"""Initial states: every one can be entered, an id is a scene, and the splits share none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from time import perf_counter
from typing import TypeVar

import numpy as np
from attrs import define, evolve, field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array, ResetState, to_numpy
from vla_rl.testing.common.findings import LeftOut, Unfit
from vla_rl.testing.env_checks.player import KEYED, SMALL_SEEDS, Player
from vla_rl.testing.env_checks.traces import EnvView, Slack, average_regions, describe_difference, describe_gap

T = TypeVar("T")
SHARES = {"eval": (0.04, 0.15), "train": (0.02, 0.08)}
"""Shares of the time for each split: after the first, `FEW` states are enough; after the second, any number is."""
FEW = 100
FAILURES = 3
"""Number of states that cannot be entered after which the others are skipped."""
SCENES = 6
"""Number of states that are checked for changes with the seed."""
AGAIN = 4
"""Number of states of a split that are entered twice."""
PAIRS = 8
"""Number of pairs of similar states whose episodes are compared."""


@frozen(eq=False)
class FirstFrames:
    """The first view of a state."""

    state: int
    split: str
    mark: bytes
    numbers: Array | None
    view: EnvView | None
    """The view, kept for the first states that were entered."""


@define(eq=False)
class StartChecks:
    every: dict[int, FirstFrames] = field(factory=dict)

    def of_split(self, split: str) -> list[FirstFrames]:
        return [start for start in self.every.values() if start.split == split]


def first_contact(player: Player) -> None:
    """Before any other call: one env is used, and the others have never been reset. With seeds as large as a run's."""
    last, state = len(player.env_ids) - 1, player.splits["train"][0].id
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
    unfit = [stop for stop in (True, False) if not _one_chunk(player, last, state, stop)]
    if unfit:
        raise Unfit


def _one_chunk(player: Player, env_id: int, state: int, stop: bool) -> bool:
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


def enter_states(player: Player) -> StartChecks:
    """Reset every state, or as many as there is time for, well spread. Those that cannot be entered are left out of
    what follows."""
    starts = StartChecks()
    for split in ("eval", "train"):
        began, states = perf_counter(), player.splits[split]
        soon, late = (share * player.seconds for share in SHARES[split])
        entered: list[ResetState] = []
        failed: dict[int, str] = {}
        for batch in _spread_batches(states, len(player.env_ids)):
            if player.hopeless:
                break
            limit = soon if len(entered) >= FEW else late
            if entered and (perf_counter() - began > limit or len(failed) >= FAILURES):
                break
            failed |= _enter_batch(player, starts, split, batch, len(entered))
            entered += batch
        for error in dict.fromkeys(failed.values()):
            ids = ", ".join(str(state) for state, text in failed.items() if text == error)
            player.findings.record_error(
                f"reset: expected {split} state {ids} to be entered", error, "fix what raises it"
            )
        if len(entered) < len(states) and not player.hopeless:
            tasks, entered_tasks = ({state.task for state in several} for several in (states, entered))
            of_tasks = f" ({len(entered_tasks)} of {len(tasks)} tasks)" if len(tasks) > 1 else ""
            player.notice(f"not seen: all {split} states; entered {len(entered)} of {len(states)}{of_tasks}")
        player.splits[split] = tuple(s for s in states if s.id not in failed) if starts.of_split(split) else ()
    return starts


def _enter_batch(
    player: Player, starts: StartChecks, split: str, batch: Sequence[ResetState], shift: int
) -> dict[int, str]:
    """Enter the states. Return the error of each state that cannot be entered."""
    env_ids = np.roll(player.env_ids, shift)[: len(batch)]
    ids = [state.id for state in batch]
    try:
        env_views = player.reset_envs(env_ids, ids, [player.derive_seed(0)] * len(ids))
    except (Unfit, LeftOut):
        raise
    except Exception as exc:
        if len(batch) == 1 or player.hopeless:
            return {batch[0].id: f"{type(exc).__name__}: {str(exc).strip()}"}
        failed: dict[int, str] = {}
        for state in batch:
            if not player.hopeless:
                failed |= _enter_batch(player, starts, split, [state], 0)
        return failed
    for state, view in zip(batch, env_views, strict=True):
        view_to_compare = view if len(starts.of_split(split)) < AGAIN else None
        starts.every[state.id] = FirstFrames(state.id, split, view.view_hash, view.state, view_to_compare)
    return {}


def enter_again(player: Player, starts: StartChecks) -> None:
    """States that were entered before, the other way round and in the last env, are the same scenes."""
    for start in reversed([start for start in starts.every.values() if start.view is not None]):
        (view,) = player.reset_envs(player.env_ids[-1:], [start.state], [player.derive_seed(0)])
        deviation = describe_gap(start.view, view, player.slack) if start.view else ""
        got = f"{deviation} ({start.split} state {start.state})"
        expected = "equal observations when a state is entered again with the same seed"
        player.expect(not deviation, "reset", expected, got, KEYED)


def scenes_follow_ids(player: Player, starts: StartChecks) -> None:
    """Check that another id gives another scene for one seed, and that an id gives the same scene for other seeds."""
    train = player.splits["train"]
    of_train = starts.of_split("train")
    if len(of_train) > 1:
        differ = len({start.mark for start in of_train}) > 1
        got = f"the same for {len(of_train)} states"
        player.expect(differ, "reset", "another observation for another state id", got, "use state_ids")
    ids = [state.id for state in _of_one_task(train)[: 2 if player.is_slow else SCENES]]
    if len(ids) < 2:
        player.notice("not seen: whether another state id is another scene; there is only one train state")
        return
    one, two = (_enter_with(player, ids, player.derive_seed(key)) for key in (1, 2))
    if not any(describe_gap(a, b, Slack(0.0, 0.0)) for a, b in zip(one, two, strict=True)):
        return
    others = one[1:] + one[:1]
    by_seed = np.mean([_view_distances(a, b) for a, b in zip(one, two, strict=True)], axis=0)
    by_state = np.mean([_view_distances(a, b) for a, b in zip(one, others, strict=True)], axis=0)
    worst = int(np.argmin(by_seed - by_state))
    got = (
        f"first observations that differ by {by_seed[worst]:.2g} between seeds, "
        f"and by {by_state[worst]:.2g} between ids"
    )
    remedy = "the id alone says where an episode starts; the seed keys what else is random"
    fixed = bool((by_seed < 0.5 * by_state).any())
    player.expect(fixed, "reset", "the same scene for the same state id, whatever the seed", got, remedy)


def _of_one_task(states: Sequence[ResetState]) -> list[ResetState]:
    """Return the states of the task that has most of them."""
    commonest = Counter(state.task for state in states).most_common(1)[0]
    return spread_out([state for state in states if commonest[1] < 2 or state.task == commonest[0]])


def _enter_with(player: Player, ids: Sequence[int], seed: int) -> list[EnvView]:
    """One after the other in env 0, with one seed."""
    return [player.reset_envs([0], [state], [seed])[0] for state in ids]


def splits_apart(player: Player, starts: StartChecks) -> None:
    """Scenes of the eval split that start as one of the train split, and run as it, are the same scene."""
    by_mark: dict[bytes, list[FirstFrames]] = defaultdict(list)
    for start in starts.of_split("train"):
        by_mark[start.mark].append(start)
    evals = starts.of_split("eval")
    pairs = [(by_mark[start.mark][0], start) for start in evals if start.mark in by_mark]
    if not pairs:
        return
    chosen = spread_out(pairs)[:PAIRS]
    same_scenes = [(a, b) for a, b in chosen if not _states_differ(player, a.state, b.state)]
    if not same_scenes:
        return
    ids = ", ".join(f"{b.state} as {a.state}" for a, b in same_scenes[:4])
    marks = [start.mark for start in evals]
    marks_differ = len(set(marks)) == len(marks)
    if marks_differ or len(pairs) >= 0.9 * len(evals):
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
        collected = []
        for state in (one, two):
            script = evolve(player.make_script(one, kind, length), state=state, seed=player.derive_seed(0))
            expert: list[Array] = []

            def ask_expert(index: int, answers: list[Array] = expert) -> None:
                if index == 0:
                    answers.append(_expert_chunk(player))

            collected.append((player.roll_out({0: script}, between=ask_expert)[0], expert[0]))
        (a, advice), (b, other) = collected
        if describe_difference(a, b, Slack(0.0, 0.0)) or not np.array_equal(advice, other):
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
    parts = [
        float(np.abs(average_regions(one.images[name]) - average_regions(two.images[name])).mean())
        for name in one.images
    ]
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


def spread_out(items: Sequence[T]) -> list[T]:
    """The first, the last, and then always where the gaps are widest."""
    order: dict[int, None] = {0: None, len(items) - 1: None} if items else {}
    step = max(len(items) - 1, 1)
    while len(order) < len(items):
        step = max(step // 2, 1)
        order |= dict.fromkeys(range(0, len(items), step))
    return [items[i] for i in order]
