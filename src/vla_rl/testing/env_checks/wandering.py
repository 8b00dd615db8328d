"""Checks with random, extreme and held actions: ends, successes, rewards, and whether actions have an effect."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from vla_rl.testing.common.findings import LeftOut
from vla_rl.testing.env_checks.player import KINDS, End, Player
from vla_rl.testing.env_checks.ranges import ranges_count
from vla_rl.testing.env_checks.scenes import spread_out
from vla_rl.testing.env_checks.traces import EnvTrace, Script, Slack, describe_difference

ROUNDS, FEWEST = 32, 12
"""Episodes of every env: at most, and where ends and successes were seen."""
EXACT = Slack(0.0, 0.0)
ENOUGH = 16
"""Actions after which something that never changed counts as standing still, where episodes are longer."""


def run_random_episodes(player: Player) -> tuple[dict[int, EnvTrace], list[EnvTrace]]:
    """Run episodes from many states. Return the first ones, and those that ended."""
    began = perf_counter()
    first: dict[int, EnvTrace] = {}
    ended: list[EnvTrace] = []
    splits = {split: spread_out(states) for split, states in player.splits.items() if states}
    for index in range(ROUNDS):
        states = splits.get("eval" if index % 4 == 3 else "train", splits["train"])
        text_of = player.seen.won and player.seen.lost and len(ended) > 2 * len(player.env_ids)
        limit = (0.15 if index < FEWEST else 0.04) * player.seconds
        if index > 1 and (perf_counter() - began > limit or (text_of and index >= FEWEST)):
            break
        scripts = {}
        for env_id in (int(env_id) for env_id in player.env_ids):
            number = env_id if player.is_slow else index * len(player.env_ids) + env_id
            state = states[number % len(states)].id
            length = min(
                player.step_limit(state), player.chunk * player.affordable_chunks(0.05, 1, player.step_limit(state))
            )
            scripts[env_id] = player.make_script(state, KINDS[(index + env_id) % len(KINDS)], length, key=index)
        traces = player.roll_out(scripts, keep=lambda t: False)
        first = first or traces
        ended += [trace for trace in traces.values() if trace.end_step is not None]
    return first, ended


def actions_count(player: Player, whole_range: bool) -> None:
    """Other actions lead to something else, be it seen, rewarded or an end. `whole_range`: over all of their range."""
    if not player.seen.policy_acted:
        player.notice("not seen: an effect of actions; another source chose all that were executed")
        return
    states = [state.id for state in spread_out(player.splits["train"])[: len(player.env_ids)]]
    episode_limit = min(player.step_limit(state) for state in states)
    length = min(episode_limit, player.chunk * player.affordable_chunks(0.06, 4, episode_limit))
    rollouts = [_random_rollout(player, states, kind, length) for kind in ("lowest", "highest", "random", "extreme")]
    if _all_equal(rollouts):
        text = f"the same from states {states} after {length} actions at the lower bounds, at the upper ones, and drawn"
        if length < min(episode_limit, ENOUGH):
            player.notice(f"not seen: an effect of actions; {text}")
            return
        expected = "other observations, rewards or ends after other actions"
        player.expect(False, "chunk_step", expected, text, "apply the actions that are given")
        return
    _each_number_counts(player, states, length, episode_limit, whole_range)


def _each_number_counts(
    player: Player, states: Sequence[int], length: int, episode_limit: int, whole_range: bool
) -> None:
    numbers = len(player.low)
    seconds_needed = player.seconds_per_call("reset") + -(-length // player.chunk) * player.seconds_per_call(
        "chunk_step"
    )
    if length < min(episode_limit, ENOUGH):
        return
    if 3 * numbers * seconds_needed > 0.08 * player.seconds:
        player.notice("not seen: whether each number of an action counts, for want of time")
        return
    ranges_count(player, states, length, whole_range)


def _random_rollout(player: Player, states: Sequence[int], kind: str, length: int) -> dict[int, EnvTrace]:
    return player.roll_out({env_id: player.make_script(state, kind, length) for env_id, state in enumerate(states)})


def _all_equal(rollouts: Sequence[dict[int, EnvTrace]]) -> bool:
    return not any(
        describe_difference(rollouts[0][env_id], other[env_id], EXACT) for other in rollouts[1:] for env_id in other
    )


def success_is_reported(player: Player) -> None:
    """Success is neither always nor never true, and does not contradict a reward that is given at ends only."""
    sightings = player.seen
    if not sightings.chunks:
        raise LeftOut("not done: no chunk was executed")
    rewarded = [end for end in sightings.ends if end.terminated and end.reward > 0 and end.earlier == 0]
    once = len({end.reward for end in rewarded}) == 1 and (len(rewarded) > 1 or rewarded[0].steps > 1)
    if once and not sightings.rewarded_between and not any(end.success for end in rewarded):
        got = f"no success in {len(rewarded)} such ends{_describe_other_ends(sightings.ends)}"
        expected = f"success where an episode ends with the only reward that it gives, {rewarded[0].reward:g}"
        player.expect(False, "chunk_step: success", expected, got, "tell the task's predicate")
    elif sightings.won and not sightings.lost:
        got = f"success after each of {sightings.chunks} chunks, whatever was done"
        player.expect(False, "chunk_step: success", "False until the task is solved", got, "tell the task's predicate")
    elif not sightings.won:
        player.notice(f"not seen: success; {sightings.chunks} chunks were executed")
    _rewards_success(player)
    _failures_are_no_success(player)
    _limits_are_truncations(player)
    if not sightings.ends:
        player.notice(f"not seen: an end; {sightings.chunks} chunks were executed")
    if not sightings.rewarded:
        player.notice("not seen: a reward other than 0")


def _rewards_success(player: Player) -> None:
    """Check that success is rewarded, and more than failure."""
    sightings = player.seen
    won = [end for end in sightings.ends if end.success]
    if sightings.won and not sightings.rewarded and (won or len(sightings.ends) > 2):
        got = f"0 for every action of {sightings.chunks} chunks, successes included"
        player.expect(False, "chunk_step: rewards", "a reward where the task is solved", got, "reward success")
    only_rewards = [end for end in won if end.earlier == 0]
    if only_rewards and not sightings.rewarded_between and all(end.reward < 0 for end in only_rewards):
        lowest = min(end.reward for end in only_rewards)
        got = f"{lowest:g} where it is solved, as the only reward of the episode"
        player.expect(False, "chunk_step: rewards", "more for success than for failure", got, "mind the sign")


def _failures_are_no_success(player: Player) -> None:
    """Check that an episode that terminates as a failure is not a success, and say where only failures were seen."""
    sightings = player.seen
    ends = [end for end in sightings.ends if end.terminated]
    won = [end for end in ends if end.success and end.earlier == 0]
    unpaid = [end for end in won if end.reward <= 0]
    if 0 < len(unpaid) < len(won) and not sightings.rewarded_between:
        got = f"it in {len(won)} ends, {len(unpaid)} of them without the reward that the others have"
        remedy = "an episode may terminate as a failure: tell the task's predicate, not that it terminated"
        player.expect(False, "chunk_step: success", "success where an end is rewarded", got, remedy)
    if ends and not any(end.success for end in ends):
        earliest = min(end.steps for end in ends)
        failures = f"{len(ends)} episodes terminated as failures, after {earliest} actions or more"
        player.notice(f"not seen: an end by success; {failures}")


def _limits_are_truncations(player: Player) -> None:
    """Check that episodes that reach a time limit are truncated, and solved or lost ones terminated."""
    ends = player.seen.ends
    if not player.seen.policy_acted:
        return  # who chooses all actions may end each episode alike
    expected = "truncated where an episode ends for want of time"
    remedy = "leave the step limit to core, or report it as truncated: what would follow a failure is worth nothing"
    late = [end for end in ends if end.steps == end.limit > 1]
    if len(late) > 2 and all(end.terminated and not end.success for end in late):
        got = f"terminated in each of {len(late)} episodes that lasted to the step limit of {late[0].limit} unsolved"
        player.expect(False, "chunk_step: terminated", expected, got, remedy)
        return
    unsolved = [end for end in ends if end.terminated and not end.success]
    longest = max((end.steps for end in ends), default=0)
    last = [end for end in unsolved if end.steps == longest]
    if (
        len(last) > 3
        and 2 * len(last) >= len(unsolved)
        and longest > 2
        and player.seen.longest <= longest
        and all(end.steps < end.limit for end in last)
        and not any(end.truncated for end in ends)
        and sum(end.steps < longest for end in ends) > 1  # no game of fixed length, which is won or lost at its end
    ):
        got = (
            f"terminated after {longest} actions in {len(last)} of {len(unsolved)} unsolved episodes, "
            "and none is longer"
        )
        player.expect(False, "chunk_step: terminated", expected, got, remedy)
    cut = [end for end in ends if end.truncated]
    if len(cut) > 2 and all(end.steps == end.limit - 1 > 1 for end in cut):
        got = f"{cut[0].steps} of {cut[0].limit}, in each of {len(cut)} episodes"
        text_of = "as many actions as the task's max_steps before it gives up"
        player.expect(False, "chunk_step: truncated", text_of, got, "count from 1, or leave the step limit to core")
    at_first_action = [end for end in ends if end.first_only]
    if len(at_first_action) > 1 and not any(end.terminated for end in at_first_action):
        got = f"truncated only, in each of {len(at_first_action)} episodes that success ended"
        text_of = "terminated where an episode ends since the task is solved"
        player.expect(False, "chunk_step: terminated", text_of, got, "say terminated=True there")


def _describe_other_ends(ends: Sequence[End]) -> str:
    return ", but in others" if any(end.success for end in ends) else ""


def takeovers_are_reported(player: Player) -> None:
    """Check that what whoever takes over does is not always what the policy wanted, and has another source."""
    sightings = player.seen
    # `executed_actions` is not read where the policy acted: an env may leave all of it unfilled there, not a part.
    if sightings.copied and sightings.unlabelled:
        got = f"others in {sightings.unlabelled} of {sightings.copied + sightings.unlabelled} of them"
        expected = "the policy's actions where `source` says that it chose"
        remedy = "say who chose the others (ActionSource.PERSON or EXPERT)"
        player.expect(False, "executed_actions", expected, got, remedy)
    if not sightings.taken_over:
        player.notice("not seen: a takeover")
    elif sightings.taken_over >= ENOUGH:
        got = f"the policy's, in each of {sightings.taken_over} actions that it did not choose"
        remedy = "report what was executed, and `source` where another source chose it"
        player.expect(sightings.overruled, "executed_actions", "actions of whoever took over", got, remedy)


def what_is_shown_changes(player: Player) -> None:
    """Check that what differs between scenes also changes while envs move, in the images or in the state."""
    sightings = player.seen
    text_of = {name: "the state" if name == "state" else f"the image of camera {name!r}" for name in sightings.moved}
    still = [text_of[name] for name, moved in sightings.moved.items() if not moved]
    if len(still) == len(text_of) and any(sightings.varied.values()) and (sightings.rewarded or sightings.ends):
        got = f"the same after each of {sightings.chunks} chunks as after the reset"
        expected = f"{' or '.join(still)} to show what was done"
        player.expect(False, "chunk_step", expected, got, "observe after the last action")
    else:
        for what in still:
            player.notice(f"not seen: a change of {what} by actions")
    for (one, two), alike in sightings.alike.items():
        low, high = sightings.levels[two]
        got = f"the image of camera {one!r} after each of {sightings.chunks} chunks"
        expected = "its own view"
        player.expect(not alike or low == high, f"image {two!r}", expected, got, "render each camera, or leave one out")
    for name, (low, high) in sightings.levels.items():
        if (low, high) == (0, 1):
            remedy = "multiply by 255 before the conversion"
            player.expect(False, f"image {name!r}", "values from 0 to 255", "nothing above 1", remedy)
        elif low == high:
            player.notice(f"not seen: anything in the images of camera {name!r}; all pixels are {low}")


def chosen_scripts(player: Player, length: int) -> dict[int, Script]:
    """Return a script for each env, from different states if enough are available."""
    states = spread_out(player.splits["train"])
    env_ids = [int(env_id) for env_id in player.env_ids]
    kinds = ("random", "extreme", "slowly changing")
    return {r: player.make_script(states[r % len(states)].id, kinds[r % 3], length, key=r) for r in env_ids}


def shortest_limit(player: Player) -> int:
    """Return the shortest step limit among the states that `chosen_scripts` uses."""
    states = spread_out(player.splits["train"])[: len(player.env_ids)]
    return int(np.min([player.step_limit(state.id) for state in states]))
