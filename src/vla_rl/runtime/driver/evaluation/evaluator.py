"""Evaluation rollout: every evaluation state once for each repeat, on all envs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from attrs import define, field

from vla_rl.core.errors import StopAndSave, UserError
from vla_rl.core.events import EpisodeFrames, Evaluation, MissingEpisode, Rate, wilson_interval
from vla_rl.core.randomness import generator
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo, Episode, ResetState
from vla_rl.runtime.comm.handles import Fleet, Handle
from vla_rl.runtime.comm.interfaces import PolicyInterface, RolloutInterface
from vla_rl.runtime.driver.collecting.collector import Restarts
from vla_rl.runtime.driver.collecting.recordings import FetchedRecordings
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest
from vla_rl.toolkit.data.episodes import format_numbers
from vla_rl.toolkit.data.recording import settings_in

Enough = Callable[[Sequence[Episode], int], bool]
"""Whether the episodes so far, in the order of their states, of so many in all, answer an evaluation's question."""
logger = logging.getLogger(__name__)


def evaluation_requests(spec: Spec, states: Sequence[ResetState], frames: int, step: int) -> list[EpisodeRequest]:
    """Return the evaluation's episodes at `step`, `frames` of them (spread) with frames. Raises UserError for none."""
    if not states:
        raise UserError(f"env {spec.env.type!r} offers no reset states in its eval split")
    if spec.eval.episodes_per_task is not None:
        states = _first_of_each_task(states, spec.eval.episodes_per_task)
    with_frames = _spread_evenly(frames, len(states))
    settings = settings_in(spec.hooks)
    recorded = frozenset[int]()
    if settings is not None and settings.is_recorded("evaluation", step):
        limit = settings.max_episodes if settings.only == "all" else None
        episodes = len(states) * spec.eval.repeats
        recorded = _spread_evenly(limit or episodes, episodes)
    return [
        EpisodeRequest(
            state=state,
            number=i,
            episode=repeat,
            record=repeat == 0 and i in with_frames,
            recorded=repeat * len(states) + i in recorded,
        )
        for repeat in range(spec.eval.repeats)
        for i, state in enumerate(states)
    ]


@define(eq=False)
class Evaluator:
    """Rolls out evaluations on all envs of a run."""

    restarts: Restarts
    spec: Spec
    info: EnvInfo
    states: Sequence[ResetState]
    """Reset states of the eval split."""
    fault_log: FaultLog
    given_up: set[int] = field(factory=set)
    """Ids of states that broke envs in an earlier evaluation, so that later ones do without them."""
    solved: set[int] = field(factory=set)
    """Ids of states in which an episode succeeded with its first action, which were reported."""

    def evaluate_states(
        self, step: int, frames: int, on_start: Callable[[int], object], enough: Enough | None = None
    ) -> Evaluation:
        """Roll out every evaluation state once for each repeat, and keep the frames of `frames` episodes. The result
        does not depend on which env runs which episode.

        Args:
            on_start: called with the number of episodes.
            enough: called with the episodes after each round over all envs, whose states are in a fixed random order;
                True ends the evaluation.
        """
        requests = evaluation_requests(self.spec, self.states, frames, step)
        on_start(sum(request.state.id not in self.given_up for request in requests))
        evaluation = self.restarts.run_with_restarts(lambda: self._roll_out(step, requests, enough))
        immediate = evaluation.immediate_successes
        solved = {episode.state for episode in immediate}
        if solved - self.solved:
            self.solved |= solved
            logger.warning(
                "%d of %d episodes of the evaluation succeeded with their first action: their initial states (%s) may "
                "be solved already, and count as successes of any policy",
                len(immediate),
                len(evaluation.episodes),
                format_numbers(sorted(solved)),
            )
        return evaluation

    def _roll_out(self, step: int, requests: Sequence[EpisodeRequest], enough: Enough | None) -> Evaluation:
        start = perf_counter()
        fleet = self.restarts.fleet
        possible = [request for request in requests if request.state.id not in self.given_up]
        rounds = [possible] if enough is None else _split_rounds(possible, self.spec.env.num_envs)
        shares: list[tuple[int, Sequence[EpisodeRequest]]] = []
        trajectories: list[EnvTrajectory] = []
        started: list[EpisodeRequest] = []
        for part in rounds:
            split = [(policy.worker_index, share) for policy, share in split_over_policies(fleet, part)]
            greedy = self.spec.eval.greedy
            calls = [fleet.rollouts[worker].call(RolloutInterface.evaluate, share, greedy) for worker, share in split]
            reports = fleet.get_all(calls)
            for report in reports:
                self.fault_log.report_faults(report.faults)
            trajectories += [trajectory.env_part for report in reports for trajectory in report.collected]
            shares, started = [*shares, *split], [*started, *part]
            if enough is not None and enough(_order_episodes(trajectories, started), len(possible)):
                break
        if enough is not None:
            requests = started
        trajectories.sort(key=lambda trajectory: (trajectory.episodes[0].episode, trajectory.number))
        episodes = [trajectory.episodes[0] for trajectory in trajectories]
        finished = {(episode.number, episode.episode) for episode in episodes}
        missing = tuple(
            MissingEpisode(task=request.state.task, state=request.state.id, episode=request.episode)
            for request in requests
            if (request.number, request.episode) not in finished
        )
        self.given_up |= {episode.state for episode in missing}
        if not episodes:
            raise StopAndSave(f"the evaluation has no result: env {self.spec.env.type!r} broke in every episode")
        by_task: dict[str, list[Episode]] = {}
        by_category: dict[str, list[Episode]] = {}
        categories_of = {task.name: task.categories for task in self.info.tasks}
        for episode in episodes:
            by_task.setdefault(episode.task, []).append(episode)
            for category in categories_of[episode.task]:
                by_category.setdefault(category, []).append(episode)
        recorded = [(worker, (r.number, r.episode)) for worker, share in shares for r in share if r.recorded]
        return Evaluation(
            step=step,
            success=_success_rate(episodes),
            tasks={task: _success_rate(of_task) for task, of_task in by_task.items()},
            categories={category: _success_rate(by_category[category]) for category in sorted(by_category)},
            repeats=tuple(
                _success_rate([e for e in episodes if e.episode == r]).rate
                for r in sorted({e.episode for e in episodes})
            ),
            episodes=tuple(episodes),
            missing=missing,
            seconds=perf_counter() - start,
            frames=tuple(
                _episode_frames(trajectory, self.info) for trajectory in trajectories if trajectory.frames is not None
            ),
            recordings=FetchedRecordings(fleet, "evaluation", step, recorded),
        )


def split_over_policies(
    fleet: Fleet, requests: Sequence[EpisodeRequest]
) -> list[tuple[Handle[PolicyInterface], Sequence[EpisodeRequest]]]:
    """Split episodes over the policies in proportion to their envs. Return (policy, its share) of those with any."""
    envs = np.array([policy.assignment.envs_served for policy in fleet.policies])
    # Rounding the sums, not the shares, leaves no episode over.
    ends = (np.cumsum(envs) * len(requests) // envs.sum()).tolist()
    return [
        (policy, requests[start:end])
        for policy, start, end in zip(fleet.policies, [0, *ends], ends, strict=False)
        if end > start
    ]


def _split_rounds(requests: Sequence[EpisodeRequest], size: int) -> list[list[EpisodeRequest]]:
    """Return the episodes in a fixed random order, in rounds of this many."""
    order = generator(0, "evaluation/order", len(requests)).permutation(len(requests)).tolist()
    return [[requests[i] for i in order[start : start + size]] for start in range(0, len(order), size)]


def _order_episodes(trajectories: Sequence[EnvTrajectory], started: Sequence[EpisodeRequest]) -> list[Episode]:
    """Return the episodes that ended, in the order in which they were asked for."""
    ended = {(one.episode, one.number): one for trajectory in trajectories for one in trajectory.episodes}
    keys = [(request.episode, request.number) for request in started]
    return [ended[key] for key in keys if key in ended]


def _first_of_each_task(states: Sequence[ResetState], limit: int) -> list[ResetState]:
    """Return the first states of each task, at most `limit` of them."""
    counts: dict[str, int] = {}
    chosen = []
    for state in states:
        counts[state.task] = counts.get(state.task, 0) + 1
        if counts[state.task] <= limit:
            chosen.append(state)
    return chosen


def _spread_evenly(count: int, among: int) -> frozenset[int]:
    return frozenset(np.linspace(0, among - 1, min(count, among)).astype(int).tolist() if count else ())


def _episode_frames(trajectory: EnvTrajectory, info: EnvInfo) -> EpisodeFrames:
    assert trajectory.frames is not None
    (episode,) = trajectory.episodes
    instruction = next(task.instruction for task in info.tasks if task.name == episode.task)
    return EpisodeFrames(
        task=episode.task, instruction=instruction, success=episode.success_once, images=trajectory.frames
    )


def _success_rate(episodes: Sequence[Episode]) -> Rate:
    return wilson_interval(sum(e.success_once for e in episodes), len(episodes))
