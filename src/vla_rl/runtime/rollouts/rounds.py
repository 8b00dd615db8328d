"""A rollout is some rounds of all rows: which of them are played, with which weights, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from vla_rl.core.interrupts import StopRequested
from vla_rl.core.selection import groups_in
from vla_rl.core.types import Rollout
from vla_rl.runtime.rollouts.assemble import Block, assemble

if TYPE_CHECKING:
    from vla_rl.runtime.driver import Runtime

Array = np.ndarray[Any, Any]


def roll_out(runtime: Runtime, step: int) -> tuple[list[Block], Rollout, Array, Array]:
    """Play the rounds of a rollout, further ones while `rollout.resample` asks for them, with weights of
    `rollout.lag` versions ago. -> (blocks, and of them what `assemble` gives)."""
    spec = runtime.spec
    rows, section = spec.env.num_envs, spec.rollout
    if section.lag:
        _all_policies(runtime, "rewind")
    try:
        rounds = section.rounds(rows)
        blocks = play(runtime, step, range(rounds))
        assembled = assemble(step, blocks, rows, section.group_size)
        for further in range(rounds, rounds + section.further_rounds):
            rollout = runtime.algorithm.shape_rewards(assembled[0])
            if groups_in(rollout, runtime.algorithm.select(rollout)) >= section.groups:
                break
            blocks += play(runtime, step, range(further, further + 1))
            assembled = assemble(step, blocks, rows, section.group_size)
    except StopRequested:
        if section.lag:  # the newest weights are what is saved
            _all_policies(runtime, "forward")
        raise
    if section.lag:
        _all_policies(runtime, "forward")
    if "fresh-values" in runtime.algorithm.needs and bool((assembled[0].versions != runtime.version).any()):
        blocks = _with_fresh_values(runtime, blocks)
        assembled = assemble(step, blocks, rows, section.group_size)
    return blocks, *assembled


def play(runtime: Runtime, step: int, rounds: range) -> list[Block]:
    """These rounds, everywhere."""
    runtime.rounds = len(rounds)
    pending = [
        runtime.call(place.index, "worker", "play_train", step, rounds, runtime.task_weights)
        for place in runtime.policies
    ]
    played: dict[tuple[int, int], tuple[Any, Any]] = {}
    for place, of_rounds in zip(runtime.policies, runtime.backend.get_all(pending), strict=True):
        for r, results in zip(rounds, of_rounds, strict=True):
            for lane, pair in zip(place.served, results, strict=True):
                played[r, lane.index] = pair
    rows = runtime.spec.env.num_envs
    return [
        Block(lane=lane, round_index=r, first=r * rows + lane.first_row, sim=sim, policy=policy)
        for r in rounds
        for lane in runtime.lanes
        for sim, policy in (played[r, lane.index],)
    ]


def _with_fresh_values(runtime: Runtime, blocks: Sequence[Block]) -> list[Block]:
    """The blocks with values, those of final observations included, of the current critic (AcceRL eq. 3-4)."""
    pending = [
        runtime.call(runtime.server[b.lane.index], "policy", "revalue", b.lane.index, b.round_index, b.lane.rows)
        for b in blocks
    ]
    fresh = runtime.backend.get_all(pending)
    return [
        evolve(b, policy={**b.policy, "light": {**b.policy["light"], **values}})
        for b, values in zip(blocks, fresh, strict=True)
    ]


def _all_policies(runtime: Runtime, method: str) -> None:
    runtime.backend.get_all([runtime.call(place.index, "policy", method) for place in runtime.policies])
