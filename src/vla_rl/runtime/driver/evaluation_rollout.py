"""Evaluation rollout: every evaluation state once for each repeat, on all envs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.events import EpisodeFrames, Evaluation, Rate, wilson
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo, Episode, ResetState
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.runtime.driver.recordings import FetchedRecordings
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest
from vla_rl.toolkit.data.recording import settings_in


def tickets_for(spec: Spec, states: Sequence[ResetState], frames: int, step: int) -> list[EpisodeRequest]:
    """Return the episodes of the evaluation at `step`; frames are kept of `frames` of them, spread evenly. Raises
    UserError when there are none.
    """
    if not states:
        raise UserError(f"env {spec.env.type!r} offers no reset states in its eval split")
    if spec.eval.episodes_per_task is not None:
        seen: dict[str, int] = {}
        chosen = []
        for state in states:
            seen[state.task] = seen.get(state.task, 0) + 1
            if seen[state.task] <= spec.eval.episodes_per_task:
                chosen.append(state)
        states = chosen
    shown = _spread(frames, len(states))
    settings, recorded = settings_in(spec.hooks), frozenset[int]()
    if settings is not None and settings.records("evaluation", step):
        most = settings.max_episodes if settings.only == "all" else None
        recorded = _spread(most or len(states) * spec.eval.repeats, len(states) * spec.eval.repeats)
    return [
        EpisodeRequest(
            state=state,
            number=i,
            episode=repeat,
            record=repeat == 0 and i in shown,
            recorded=repeat * len(states) + i in recorded,
        )
        for repeat in range(spec.eval.repeats)
        for i, state in enumerate(states)
    ]


def evaluate(
    fleet: Fleet,
    spec: Spec,
    info: EnvInfo,
    step: int,
    tickets: Sequence[EpisodeRequest],
    report: Callable[[list[str]], object],
) -> Evaluation:
    """Roll out all tickets. The result does not depend on which env runs which ticket.

    Args:
        report: called with the faults of each worker.
    """
    before = perf_counter()
    rows = np.array([policy.assignment.envs_served for policy in fleet.policies])
    ends = (np.cumsum(rows) * len(tickets) // rows.sum()).tolist()
    pending = [
        fleet.worker_of(policy).call(HostInterface.evaluate, tickets[start:end], spec.eval.greedy)
        for policy, start, end in zip(fleet.policies, [0, *ends], ends, strict=False)
        if end > start
    ]
    reports = fleet.get_all(pending)
    for of_worker in reports:
        report(of_worker.faults)
    finished = [ticket.finished for of_worker in reports for ticket in of_worker.played]
    finished.sort(key=lambda ticket: (ticket.episodes[0].episode, ticket.number))
    episodes = [ticket.episodes[0] for ticket in finished]
    tasks = list(dict.fromkeys(e.task for e in episodes))
    return Evaluation(
        step=step,
        success=_rate(episodes),
        tasks={task: _rate([e for e in episodes if e.task == task]) for task in tasks},
        repeats=tuple(_rate([e for e in episodes if e.episode == r]).rate for r in range(spec.eval.repeats)),
        episodes=tuple(episodes),
        seconds=perf_counter() - before,
        frames=tuple(_shown(ticket, info) for ticket in finished if ticket.frames is not None),
        recordings=FetchedRecordings(fleet, "evaluation", step, [(t.number, t.episode) for t in tickets if t.recorded]),
    )


def _spread(count: int, among: int) -> frozenset[int]:
    return frozenset(np.linspace(0, among - 1, min(count, among)).astype(int).tolist() if count else ())


def _shown(ticket: EnvTrajectory, info: EnvInfo) -> EpisodeFrames:
    assert ticket.frames is not None
    (episode,) = ticket.episodes
    instruction = next(task.instruction for task in info.tasks if task.name == episode.task)
    return EpisodeFrames(task=episode.task, instruction=instruction, success=episode.success_once, images=ticket.frames)


def _rate(episodes: Sequence[Episode]) -> Rate:
    return wilson(sum(e.success_once for e in episodes), len(episodes))
