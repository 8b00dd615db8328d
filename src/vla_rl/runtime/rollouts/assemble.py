"""From what workers report to one light rollout, and from its samples to the optimiser steps of each rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.types import Advantages, Rollout
from vla_rl.runtime.assignments import LaneSlice

Array = np.ndarray[Any, Any]
Result = dict[str, Any]


@frozen(kw_only=True)
class Block:
    """One lane in one round: columns `first` .. `first + lane.rows - 1` of the rollout."""

    lane: LaneSlice
    round_index: int
    first: int
    sim: Result
    policy: Result


@frozen(kw_only=True, eq=False)
class Samples:
    """The trainable samples (chunk steps) of a rollout: where each lies in time-major order."""

    steps: Array
    columns: Array
    """int64 [S]: t and n."""
    blocks: Array
    positions: Array
    """int64 [S]: index of the block, and position in its worker's store."""


@frozen(kw_only=True, eq=False)
class Played:
    """A rollout and where its heavy parts lie."""

    rollout: Rollout
    """Its light part."""
    blocks: Sequence[Block]
    positions: Array
    """int64 [T, N]: of each chunk step in its worker's store; -1: there is none."""
    owner: Array
    """int64 [N]: index of the block of each column."""


def assemble(step: int, blocks: Sequence[Block], num_envs: int, group_size: int) -> Played:
    """One rollout of what its blocks report."""
    columns = max(block.first + block.lane.rows for block in blocks)
    length = max(block.sim["light"]["valid"].shape[0] for block in blocks)

    def gather(part: str, key: str, fill: float = 0) -> torch.Tensor | None:
        if key not in getattr(blocks[0], part)["light"]:
            return None
        sample = getattr(blocks[0], part)["light"][key]
        out = np.full((length, columns, *sample.shape[2:]), fill, sample.dtype)
        for block in blocks:
            array = getattr(block, part)["light"][key]
            out[: array.shape[0], block.first : block.first + block.lane.rows] = array
        return torch.from_numpy(out)

    column = np.arange(columns)
    success = np.zeros(columns, bool)
    tasks = [""] * columns
    owner = np.zeros(columns, np.int64)
    for index, block in enumerate(blocks):
        owner[block.first : block.first + block.lane.rows] = index
        for row, episode in block.sim["first_episode"].items():
            success[block.first + row] = episode.success_once
            tasks[block.first + row] = episode.task
    tensors = {key: gather("sim", key) for key in ("rewards", "terminated", "truncated", "valid")}
    of_policy = ("log_probs", "fresh_log_probs", "values", "next_values", "versions")
    tensors |= {key: gather("policy", key) for key in of_policy}
    rollout = Rollout(
        step=step,
        groups=torch.from_numpy(column // num_envs * (num_envs // group_size) + column % num_envs // group_size),
        success=torch.from_numpy(success),
        episodes=tuple(episode for block in blocks for episode in block.sim["episodes"]),
        features=_features(blocks, columns),
        tasks=tuple(tasks) if all(tasks) else (),
        **tensors,  # type: ignore[arg-type]
    )
    positions = gather("policy", "sample", fill=-1)
    assert positions is not None
    return Played(rollout=rollout, blocks=blocks, positions=positions.numpy(), owner=owner)


def _features(blocks: Sequence[Block], columns: int) -> torch.Tensor | None:
    first = blocks[0].policy["features"]
    if first is None:
        return None
    features = torch.zeros(columns, first.shape[1])
    for block in blocks:
        features[block.first : block.first + block.lane.rows] = torch.tensor(block.policy["features"])
    return features


def find_samples(rollout: Rollout, columns: Array, positions: Array, owner: Array) -> Samples:
    """Samples of a rollout that was cut to `columns`, in time-major order."""
    steps, kept = np.nonzero(rollout.samples.numpy())
    return Samples(steps=steps, columns=kept, blocks=owner[columns[kept]], positions=positions[steps, columns[kept]])


def light_arrays(rollout: Rollout, advantages: Advantages, samples: Samples) -> dict[str, Array | None]:
    """`Batch`'s light fields [S, ...] of all samples, weights not yet divided, plus "counts" and "value_counts" [S]."""

    def pick(tensor: torch.Tensor | None) -> Array | None:
        return None if tensor is None else tensor.numpy()[samples.steps, samples.columns]

    def total(tensor: torch.Tensor | None) -> Array:
        array = pick(tensor)
        return np.zeros(len(samples.steps)) if array is None else array.reshape(len(array), -1).sum(1, dtype=np.float64)

    counts, value_counts = advantages.divisors
    return {
        "valid": pick(rollout.valid),
        "log_probs": pick(rollout.log_probs),
        "fresh_log_probs": pick(rollout.fresh_log_probs),
        "values": pick(rollout.values),
        "versions": pick(rollout.versions),
        "advantages": pick(advantages.advantages),
        "weights": pick(advantages.weights),
        "returns": pick(advantages.returns),
        "value_weights": pick(advantages.value_weights),
        "counts": total(counts),
        "value_counts": total(value_counts),
    }
