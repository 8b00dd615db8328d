"""Demonstrators: they stay within the bounds and solve most of what training starts from."""

from __future__ import annotations

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array, to_numpy
from vla_rl.testing.common.findings import LeftOut, Unfit
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.traces import NUMBERS, EnvTrace
from vla_rl.testing.env_checks.values import check_array


def run_expert(player: Player, min_success: float) -> list[EnvTrace]:
    """Run one episode of the expert in every env. Return the trace of each env, up to success or the end."""
    train = player.splits["train"]
    chosen = [train[i] for i in np.linspace(0, len(train) - 1, len(player.env_ids)).round().astype(int)]
    length = max(player.step_limit(state.id) for state in chosen)
    empty = {env_id: player.make_script(state.id, "expert's", length) for env_id, state in enumerate(chosen)}
    traces = player.begin_episodes(empty)
    active = np.ones(len(player.env_ids), bool)
    while active.any():
        actions = _expert_actions(player, active)
        for env_id, trace in traces.items():
            trace.script.actions[len(trace) : len(trace) + player.chunk] = actions[env_id, : length - len(trace)]
        left = min(length - len(trace) for env_id, trace in traces.items() if active[env_id])
        player.advance_episodes(traces, active, min(player.chunk, left))
        for env_id, state in enumerate(chosen):
            trace = traces[env_id]
            active[env_id] &= trace.end_step is None and not trace.has_won and len(trace) < player.step_limit(state.id)
    unsolved = [state.id for env_id, state in enumerate(chosen) if not traces[env_id].has_won]
    share = 1 - len(unsolved) / len(chosen)
    got = f"{share:.0%} of {len(chosen)} (not solved: {unsolved})"
    player.expect(
        share >= min_success, "expert_chunk", f"success in {min_success:.0%} of train states", got, "fix the expert"
    )
    return list(traces.values())


def _expert_actions(player: Player, active: Array) -> Array:
    try:
        chunk = player.env.expert_chunk()
    except UserError as exc:
        raise LeftOut(str(exc)) from exc
    if not check_array(player, chunk, (len(active), player.chunk, len(player.low)), "float32", "expert_chunk"):
        raise Unfit
    actions = np.array(to_numpy(chunk))
    inside = bool(((actions >= player.low - NUMBERS) & (actions <= player.high + NUMBERS))[active].all())
    player.expect(inside, "expert_chunk", "actions within info.action_low..action_high", "others", "clip them")
    return actions
