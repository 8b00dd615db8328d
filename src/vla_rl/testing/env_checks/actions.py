"""What actions lead to: has every number an effect over its whole range, are actions applied, are ends, rewards and
successes told, is what was done shown?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from attrs import evolve, frozen

from vla_rl.core.types import Array
from vla_rl.testing.common.findings import LeftOut
from vla_rl.testing.env_checks.player import KINDS, Player, spread_out
from vla_rl.testing.env_checks.traces import EXACT, EnvTrace, describe_difference

ROUNDS, FEWEST = 32, 12
"""Episodes of every env: at most, and where ends and successes were seen."""
ENOUGH = 16
"""Actions after which something that never changed counts as standing still, where episodes are longer."""
IN_TIME = "leave the step limit to core, or report it as truncated: what would follow a failure is worth nothing"


def check_actions(player: Player) -> None:
    """Run episodes from many states; other actions lead to something else, be it seen, rewarded or an end."""
    _run_random_episodes(player)
    if not any(step.by_policy for trace in player.record.collected for step in trace.steps):
        player.notice("not seen: an effect of actions; another source chose all that were executed")
        return
    states = player.spread_states[: len(player.env_ids)]
    limit = player.shortest_limit
    length = min(limit, player.chunk * player.affordable_chunks(0.06, 4, limit))
    rollouts = [
        player.roll_out({env_id: player.make_script(state, kind, length) for env_id, state in enumerate(states)})
        for kind in ("lowest", "highest", "random", "extreme")
    ]
    long_enough = length >= min(limit, ENOUGH)
    if not any(describe_difference(rollouts[0][e], other[e], EXACT) for other in rollouts[1:] for e in other):
        text = f"the same from states {states} after {length} actions at the lower bounds, at the upper ones, and drawn"
        expected = "other observations, rewards or ends after other actions"
        if player.expect(not long_enough, "chunk_step", expected, text, "apply the actions that are given"):
            player.notice(f"not seen: an effect of actions; {text}")
        return
    seconds = player.seconds_per_call("reset") + -(-length // player.chunk) * player.seconds_per_call("chunk_step")
    if long_enough and 3 * len(player.low) * seconds > 0.08 * player.seconds:
        player.notice("not seen: whether each number of an action counts, for want of time")
    elif long_enough:
        check_ranges(player, states, length)


def _run_random_episodes(player: Player) -> None:
    began, record = perf_counter(), player.record
    splits = {split: spread_out(states) for split, states in player.splits.items() if states}
    for index in range(ROUNDS):
        states = splits.get("eval" if index % 4 == 3 else "train", splits["train"])
        enough = len(_successes(player)) > 1 and len(record.ended) > 2 * len(player.env_ids)
        limit = (0.15 if index < FEWEST else 0.04) * player.seconds
        if index > 1 and (perf_counter() - began > limit or (enough and index >= FEWEST)):
            break
        scripts = {}
        for env_id in player.env_ids:
            number = env_id if player.is_slow else index * len(player.env_ids) + env_id
            state = states[number % len(states)].id
            most = player.step_limit(state)
            length = min(most, player.chunk * player.affordable_chunks(0.05, 1, most))
            scripts[env_id] = player.make_script(state, KINDS[(index + env_id) % len(KINDS)], length, key=index)
        traces = player.roll_out(scripts, keep_images=False)
        record.earliest = record.earliest or traces
        record.ended += [trace for trace in traces.values() if trace.end_step is not None]


@frozen
class End:
    """The end of an episode."""

    terminated: bool
    truncated: bool
    reward: float
    success: bool
    steps: int
    limit: int
    """Step limit of the task."""
    only_reward: bool
    """Nothing was rewarded before."""
    first_success: bool
    """Success came with the last action and not before."""

    @classmethod
    def of_trace(cls, player: Player, trace: EnvTrace) -> End:
        """`trace`: one that ended."""
        *before, last = trace.steps[: trace.end_or_length]
        return cls(
            terminated=last.terminated,
            truncated=last.truncated,
            reward=last.reward,
            success=trace.success[len(trace)],
            steps=len(before) + 1,
            limit=player.step_limit(trace.script.state),
            only_reward=not any(step.reward for step in before),
            first_success=bool(last.succeeded) and not any(step.succeeded for step in before),
        )


def check_outcomes(player: Player) -> None:
    """Look at all that was played."""
    if not player.chunk_count:
        raise LeftOut("not done: no chunk was executed")
    collected = player.record.collected
    ends = [End.of_trace(player, trace) for trace in collected if trace.stops and trace.end_step is not None]
    steps = [step for trace in collected for step in trace.steps]
    rewarded = any(step.reward for step in steps)
    rewarded_between = any(step.reward and not step.ends for step in steps)
    _check_success(player, ends, rewarded_between)
    _check_rewards(player, ends, rewarded, rewarded_between)
    _check_limits(player, ends)
    terminated = [end for end in ends if end.terminated]
    if not ends:
        player.notice(f"not seen: an end; {player.chunk_count} chunks were executed")
    elif terminated and not any(end.success for end in terminated):
        earliest = min(end.steps for end in terminated)
        text = f"{len(terminated)} episodes terminated as failures, after {earliest} actions or more"
        player.notice(f"not seen: an end by success; {text}")
    if not rewarded:
        player.notice("not seen: a reward other than 0")
    _check_what_is_shown(player, bool(ends) or rewarded)


def _successes(player: Player) -> set[bool]:
    return {success for trace in player.record.collected for success in trace.success.values()}


def _check_success(player: Player, ends: Sequence[End], rewarded_between: bool) -> None:
    """Success is neither always nor never true, and does not contradict a reward that is given at ends only."""
    where, remedy = "chunk_step: success", "tell the task's predicate"
    rewarded = [end for end in ends if end.terminated and end.reward > 0 and end.only_reward]
    once = len({end.reward for end in rewarded}) == 1 and (len(rewarded) > 1 or rewarded[0].steps > 1)
    seen = _successes(player)
    if once and not rewarded_between and not any(end.success for end in rewarded):
        got = f"no success in {len(rewarded)} such ends{', but in others' * any(end.success for end in ends)}"
        expected = f"success where an episode ends with the only reward that it gives, {rewarded[0].reward:g}"
        player.expect(False, where, expected, got, remedy)
    elif seen == {True}:
        got = f"success after each of {player.chunk_count} chunks, whatever was done"
        player.expect(False, where, "False until the task is solved", got, remedy)
    elif True not in seen:
        player.notice(f"not seen: success; {player.chunk_count} chunks were executed")
    won = [end for end in ends if end.terminated and end.success and end.only_reward]
    unpaid = [end for end in won if end.reward <= 0]
    if 0 < len(unpaid) < len(won) and not rewarded_between:
        got = f"it in {len(won)} ends, {len(unpaid)} of them without the reward that the others have"
        remedy = "an episode may terminate as a failure: tell the task's predicate, not that it terminated"
        player.expect(False, where, "success where an end is rewarded", got, remedy)


def _check_rewards(player: Player, ends: Sequence[End], rewarded: bool, rewarded_between: bool) -> None:
    """Check that success is rewarded, and more than failure."""
    where, won = "chunk_step: rewards", [end for end in ends if end.success]
    if True in _successes(player) and not rewarded and (won or len(ends) > 2):
        got = f"0 for every action of {player.chunk_count} chunks, successes included"
        player.expect(False, where, "a reward where the task is solved", got, "reward success")
    only_rewards = [end.reward for end in won if end.only_reward]
    if only_rewards and not rewarded_between and max(only_rewards) < 0:
        got = f"{min(only_rewards):g} where it is solved, as the only reward of the episode"
        player.expect(False, where, "more for success than for failure", got, "mind the sign")


def _check_limits(player: Player, ends: Sequence[End]) -> None:
    """Check that episodes that reach a time limit are truncated, and solved or lost ones terminated."""
    collected = player.record.collected
    if not any(step.by_policy for trace in collected for step in trace.steps):
        return  # who chooses all actions may end each episode alike
    where, expected = "chunk_step: terminated", "truncated where an episode ends for want of time"
    late = [end for end in ends if end.steps == end.limit > 1]
    if len(late) > 2 and all(end.terminated and not end.success for end in late):
        got = f"terminated in each of {len(late)} episodes that lasted to the step limit of {late[0].limit} unsolved"
        player.expect(False, where, expected, got, IN_TIME)
        return
    unsolved = [end for end in ends if end.terminated and not end.success]
    longest = max((end.steps for end in ends), default=0)
    last = [end for end in unsolved if end.steps == longest]
    if (
        len(last) > 3
        and 2 * len(last) >= len(unsolved)
        and longest > 2
        and max(len(trace) for trace in collected if trace.stops) <= longest
        and all(end.steps < end.limit for end in last)
        and not any(end.truncated for end in ends)
        and sum(end.steps < longest for end in ends) > 1  # no game of fixed length, which is won or lost at its end
    ):
        got = f"terminated after {longest} actions in {len(last)} of {len(unsolved)} unsolved episodes, and none longer"
        player.expect(False, where, expected, got, IN_TIME)
    cut = [end for end in ends if end.truncated]
    if len(cut) > 2 and all(end.steps == end.limit - 1 > 1 for end in cut):
        got = f"{cut[0].steps} of {cut[0].limit}, in each of {len(cut)} episodes"
        expected = "as many actions as the task's max_steps before it gives up"
        player.expect(False, "chunk_step: truncated", expected, got, "count from 1, or leave the step limit to core")
    solved = [end for end in ends if end.first_success]
    if len(solved) > 1 and not any(end.terminated for end in solved):
        got = f"truncated only, in each of {len(solved)} episodes that success ended"
        expected = "terminated where an episode ends since the task is solved"
        player.expect(False, where, expected, got, "say terminated=True there")


def check_takeovers(player: Player) -> None:
    """Check that what whoever takes over does is not always what the policy wanted, and has another source."""
    own: list[bool] = []
    others: list[bool] = []
    for trace in player.record.collected:
        for step, wanted in zip(trace.steps, trace.script.actions, strict=False):
            differs = bool((np.abs(step.executed - wanted) > 1e-4 * (player.high - player.low)).any())
            (own if step.by_policy else others).append(differs)
    # `executed_actions` is not read where the policy acted: an env may leave all of it unfilled there, not a part.
    if any(own) and not all(own):
        got, expected = f"others in {sum(own)} of {len(own)} of them", "the policy's actions where `source` says that"
        remedy = "say who chose the others (ActionSource.PERSON or EXPERT)"
        player.expect(False, "executed_actions", f"{expected} it chose", got, remedy)
    if not others:
        player.notice("not seen: a takeover")
    elif len(others) >= ENOUGH:
        got = f"the policy's, in each of {len(others)} actions that it did not choose"
        remedy = "report what was executed, and `source` where another source chose it"
        player.expect(any(others), "executed_actions", "actions of whoever took over", got, remedy)


def _check_what_is_shown(player: Player, something_happened: bool) -> None:
    """Check that what differs between scenes also changes while envs move, in the images or in the state."""
    record, chunks = player.record, f"after each of {player.chunk_count} chunks"
    still = {
        name: "the state" if name == "state" else f"the image of camera {name!r}"
        for name, shown in record.shown.items()
        if not shown.moved
    }
    if len(still) == len(record.shown) and something_happened and any(s.varied for s in record.shown.values()):
        expected, remedy = f"{' or '.join(still.values())} to show what was done", "observe after the last action"
        player.expect(False, "chunk_step", expected, f"the same {chunks} as after the reset", remedy)
    else:
        for what in still.values():
            player.notice(f"not seen: a change of {what} by actions")
    for (one, two), alike in record.alike.items():
        holds = not alike or record.shown[two].low == record.shown[two].high
        got, remedy = f"the image of camera {one!r} {chunks}", "render each camera, or leave one out"
        player.expect(holds, f"image {two!r}", "its own view", got, remedy)
    for name in player.info.cameras:
        shown = record.shown[name]
        if (shown.low, shown.high) == (0, 1):
            remedy = "multiply by 255 before the conversion"
            player.expect(False, f"image {name!r}", "values from 0 to 255", "nothing above 1", remedy)
        elif shown.low == shown.high:
            player.notice(f"not seen: anything in the images of camera {name!r}; all pixels are {shown.low:g}")


NUDGE = 0.03
"""Share of a range that actions are moved by, to see whether small differences count."""
LEVELS = (0.1, 0.9, 0.35, 0.65)
"""Shares of a range that a number takes, one after the other, on both sides of its middle."""
MEANT = "where it is meant, check with whole_range=False"


def check_ranges(player: Player, states: Sequence[int], length: int) -> None:
    """Replace parts of the range of one number at a time, and look for any difference. `states`: where envs start."""
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
