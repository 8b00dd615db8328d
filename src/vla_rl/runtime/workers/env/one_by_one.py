"""Execution of a chunk as single actions, so that cameras are rendered after each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.fields import Field, arrange_fields, read_field
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.samples import result_fields
from vla_rl.core.types import Array, ChunkResult, Observation, pick_rows, to_numpy

Saw = Callable[[Array, Observation], None]


def one_by_one(
    env: SimEnv, actions: Array, active: Array, stop_at_end: bool, observers: Sequence[Saw]
) -> tuple[ChunkResult, dict[int, Sequence[str]]]:
    """Return what `env.chunk_step` returns for the whole chunk, and the envs that broke with the texts of their faults.

    Args:
        observers: functions that are called after each action with the envs that executed it (int64) and the
            observation of all envs.
    """
    going, faults = active.copy(), dict[int, Sequence[str]]()
    last = np.zeros(len(active), np.int64)
    parts: list[ChunkResult] = []
    for i in range(actions.shape[1]):
        parts.append(part := env.chunk_step(actions[:, i : i + 1], going.copy(), stop_at_end))
        last[going] = i
        broken: Mapping[int, Sequence[str]] = env.faults()
        faults.update(broken)
        going &= to_numpy(part.executed)[:, 0].astype(bool)
        going[list(broken)] = False
        for saw in observers:
            saw(np.flatnonzero(going), part.obs)
        if stop_at_end:
            going &= ~(to_numpy(part.terminated) | to_numpy(part.truncated))[:, 0].astype(bool)
        if not going.any():
            break
    last[~active] = len(parts) - 1
    padding = actions.shape[1] - len(parts)

    ends = last * len(active) + np.arange(len(active))

    def stack_field(field: Field) -> Any:
        arrays = [read_field(part, field) for part in parts]
        if any(array is None for array in arrays):  # what is missing is named where results are checked
            return None
        if "C" not in field.dims.split():
            return pick_rows(np.concatenate([to_numpy(array) for array in arrays]), ends)
        columns = np.concatenate([to_numpy(array) for array in arrays], 1)
        return np.pad(columns, [(0, 0), (0, padding), *[(0, 0)] * (columns.ndim - 2)])

    result = ChunkResult(
        obs=parts[-1].obs if (last == last[0]).all() else Observation.concat([p.obs for p in parts]).take(ends),
        **arrange_fields(ChunkResult, {field.name: stack_field(field) for field in result_fields(env.info)}),
    )
    return result, faults
