"""Columns of a rollout, cut, joined and padded by the tables of `fields.py`, whatever fields there are: its own, those
of the workers that hold its samples, and the numbers that plugins declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.core.errors import PluginError
from vla_rl.core.fields import RESULT, ROLLOUT, SAMPLE_IDS, Field
from vla_rl.core.types import Array, EnvInfo, to_numpy

if TYPE_CHECKING:
    from torch import Tensor

FIELDS = {field.name: field for field in (*ROLLOUT, *SAMPLE_IDS)}


def result_fields(info: EnvInfo) -> tuple[Field, ...]:
    """Return the fields that a simulator with this `EnvInfo` reports after a chunk step, its extras among them."""
    known = (field for field in RESULT if not field.given_with or getattr(info, field.given_with))
    extras = (Field(name=name, dims=f"N {dims}".strip(), source="env") for name, dims in info.extras.items())
    return (*known, *extras)


def by_action(tensor: Tensor) -> Tensor:
    """Return [T, N, C] as [T * C, N]: one time axis of actions."""
    steps, columns, chunk = tensor.shape
    return tensor.permute(0, 2, 1).reshape(steps * chunk, columns)


def by_chunk(flat: Tensor, chunk: int) -> Tensor:
    """Return [T * C, N] as [T, N, C], the inverse of `by_action`."""
    return flat.reshape(-1, chunk, flat.shape[1]).permute(0, 2, 1)


def has_steps(name: str) -> bool:
    """Return whether a field has a time axis, [T, N, ...]. Numbers that plugins declare have one."""
    return name not in FIELDS or FIELDS[name].dims.startswith("T")


def take_columns(arrays: Mapping[str, Any], columns: Any) -> dict[str, Any]:
    """Return fields cut to these columns, int64 [K]: an index of their kind, NumPy or torch."""
    return {name: array[:, columns] if has_steps(name) else array[columns] for name, array in arrays.items()}


def join_columns(parts: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Return rollouts' fields (NumPy or torch) joined by columns, padded at the end. PluginError if some lack one."""
    length = max((len(array) for part in parts for name, array in part.items() if has_steps(name)), default=0)
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        lacking = [index for index, part in enumerate(parts) if name not in part]
        if lacking:
            raise PluginError(
                f"{len(lacking)} of {len(parts)} trajectories of a rollout have no {name!r}, which the others have: a "
                "simulator or a policy that reports a number has to report it after every chunk, and all of a run's do"
            )
        fill = FIELDS[name].fill if name in FIELDS else 0.0
        joined[name] = _join_arrays([to_numpy(part[name]) for part in parts], length if has_steps(name) else None, fill)
    return joined


def stack_columns(trajectories: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return fields [T, N, ...] of N trajectories' fields [T_n, ...]; raises as `join_columns`."""
    return join_columns([{name: array[:, None] for name, array in one.items()} for one in trajectories])


def _join_arrays(arrays: Sequence[Array], length: int | None, fill: float) -> Array:
    """Return arrays [N_i, ...] one after another; with a length T, arrays [T_i, N_i, ...] side by side and padded."""
    if length is None:
        return np.concatenate(arrays)
    first = arrays[0]
    columns = np.full((length, sum(array.shape[1] for array in arrays), *first.shape[2:]), fill, first.dtype)
    start = 0
    for array in arrays:
        end = start + array.shape[1]
        columns[: len(array), start:end] = array
        start = end
    return columns
