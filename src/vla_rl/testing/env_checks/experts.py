"""Demonstrators: do they stay within the bounds, solve most of what training starts from, and move nothing?"""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array, to_numpy
from vla_rl.testing.common.findings import LeftOut, Unfit, check_array
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.traces import NUMBERS


def check_expert(player: Player) -> None:
    """Run one episode of the expert in every env, up to success or the end."""
    train = player.splits["train"]
    chosen = [train[i].id for i in np.linspace(0, len(train) - 1, len(player.env_ids)).round().astype(int)]
    length = max(player.step_limit(state) for state in chosen)
    traces = player.begin_episodes(
        {env_id: player.make_script(state, "expert's", length) for env_id, state in enumerate(chosen)}
    )
    active = np.ones(len(chosen), bool)
    while active.any():
        actions = _expert_actions(player, active)
        for env_id, trace in traces.items():
            trace.script.actions[len(trace) : len(trace) + player.chunk] = actions[env_id, : length - len(trace)]
        left = min(length - len(trace) for env_id, trace in traces.items() if active[env_id])
        player.advance_episodes(traces, active, min(player.chunk, left))
        for env_id, trace in traces.items():
            over = trace.end_step is not None or trace.has_won or len(trace) >= player.step_limit(chosen[env_id])
            active[env_id] &= not over
    player.record.ended += [trace for trace in traces.values() if trace.end_step is not None]
    unsolved = [trace.script.state for trace in traces.values() if not trace.has_won]
    share, least = 1 - len(unsolved) / len(chosen), player.options.expert_success
    got = f"{share:.0%} of {len(chosen)} (not solved: {unsolved})"
    player.expect(share >= least, "expert_chunk", f"success in {least:.0%} of train states", got, "fix the expert")


def ask_expert(player: Player) -> Any:
    """Return the expert's chunks. Raises LeftOut if there is no expert."""
    try:
        return player.env.expert_chunk()
    except UserError as exc:
        raise LeftOut(str(exc)) from exc


def _expert_actions(player: Player, active: Array) -> Array:
    chunk = ask_expert(player)
    if not check_array(player, chunk, (len(active), player.chunk, len(player.low)), "float32", "expert_chunk"):
        raise Unfit
    actions = np.array(to_numpy(chunk))
    inside = bool(((actions >= player.low - NUMBERS) & (actions <= player.high + NUMBERS))[active].all())
    player.expect(inside, "expert_chunk", "actions within info.action_low..action_high", "others", "clip them")
    return actions
