"""Demonstrators: they stay within the bounds and solve most of what training starts from."""

from __future__ import annotations

import numpy as np

from vla_rl.core.errors import NotOffered
from vla_rl.core.types import Array, to_numpy
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.traces import NUMBERS, EnvTrace
from vla_rl.testing.env_checks.values import check_array
from vla_rl.testing.findings import LeftOut, Unfit


def demonstrate(player: Player, wanted: float) -> list[EnvTrace]:
    """Play one episode in every row as the expert says. -> what it did; of each row until it had won or ended."""
    train = player.splits["train"]
    chosen = [train[i] for i in np.linspace(0, len(train) - 1, len(player.rows)).round().astype(int)]
    length = max(player.limit(state.id) for state in chosen)
    empty = {row: player.script(state.id, "expert's", length) for row, state in enumerate(chosen)}
    traces = player.begin(empty)
    active = np.ones(len(player.rows), bool)
    while active.any():
        actions = _advice(player, active)
        for row, trace in traces.items():
            trace.script.actions[len(trace) : len(trace) + player.chunk] = actions[row, : length - len(trace)]
        left = min(length - len(trace) for row, trace in traces.items() if active[row])
        player.advance(traces, active, min(player.chunk, left))
        for row, state in enumerate(chosen):
            trace = traces[row]
            active[row] &= trace.end is None and not trace.won and len(trace) < player.limit(state.id)
    lost = [state.id for row, state in enumerate(chosen) if not traces[row].won]
    share = 1 - len(lost) / len(chosen)
    got = f"{share:.0%} of {len(chosen)} (not solved: {lost})"
    player.expect(share >= wanted, "expert_chunk", f"success in {wanted:.0%} of train states", got, "fix the expert")
    return list(traces.values())


def _advice(player: Player, active: Array) -> Array:
    try:
        chunk = player.env.expert_chunk()
    except NotOffered as exc:
        raise LeftOut(str(exc)) from exc
    if not check_array(player, chunk, (len(active), player.chunk, len(player.low)), "float32", "expert_chunk"):
        raise Unfit
    actions = np.array(to_numpy(chunk))
    inside = bool(((actions >= player.low - NUMBERS) & (actions <= player.high + NUMBERS))[active].all())
    player.expect(inside, "expert_chunk", "actions within info.action_low..action_high", "others", "clip them")
    return actions
