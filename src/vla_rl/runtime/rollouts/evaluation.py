"""Evaluation: every evaluation state once per repeat, on all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.events import Evaluation, Rate, wilson
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Episode, ResetState
from vla_rl.runtime.fleet import Fleet
from vla_rl.runtime.roles.sim import EvalItem
from vla_rl.runtime.worker import Worker


def eval_items(spec: Spec, states: Sequence[ResetState], frames: int) -> list[EvalItem]:
    """The episodes of an evaluation, of which `frames`, spread evenly, are recorded. Raises UserError when there are
    none."""
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
    shown = set(np.linspace(0, len(states) - 1, min(frames, len(states))).astype(int).tolist()) if frames else set()
    return [
        EvalItem(state=state, index=i, repeat=repeat, record=repeat == 0 and i in shown)
        for repeat in range(spec.eval.repeats)
        for i, state in enumerate(states)
    ]


def evaluate(
    fleet: Fleet,
    spec: Spec,
    step: int,
    items: Sequence[EvalItem],
    report: Callable[[Sequence[Mapping[str, Any]]], object],
    progress: Callable[[int], None],
) -> Evaluation:
    """Play the items. The result does not depend on how rows are placed: a row plays neighbours in the list, so that it
    seldom changes the task.

    Args:
        report: is told what lanes say of each round, for rows that broke.
        progress: is told how many episodes have begun.
    """
    before = perf_counter()
    episodes: list[Episode] = []
    recorded: list[Any] = []
    num_envs = spec.env.num_envs
    rounds = -(-len(items) // num_envs)
    for r in range(rounds):
        progress(min(r * num_envs, len(items)))
        of_row = [items[i] if i < len(items) else None for i in range(r, num_envs * rounds, rounds)]
        pending = []
        for policy in fleet.policies:
            own = {s.index: of_row[s.first_row : s.first_row + s.rows] for s in policy.assignment.served}
            pending.append(fleet.worker_of(policy).call(Worker.play_eval, own, spec.eval.greedy))
        results = [result for played in fleet.get_all(pending) for result in played]
        report(results)
        for result in results:
            episodes.extend(result["episodes"])
            recorded.extend(result["frames"])
    episodes.sort(key=lambda e: (e.episode, e.row))
    tasks = list(dict.fromkeys(e.task for e in episodes))
    return Evaluation(
        step=step,
        success=_rate(episodes),
        tasks={task: _rate([e for e in episodes if e.task == task]) for task in tasks},
        repeats=tuple(_rate([e for e in episodes if e.episode == r]).rate for r in range(spec.eval.repeats)),
        episodes=tuple(episodes),
        seconds=perf_counter() - before,
        frames=tuple(recorded),
    )


def _rate(episodes: Sequence[Episode]) -> Rate:
    return wilson(sum(e.success_once for e in episodes), len(episodes))
