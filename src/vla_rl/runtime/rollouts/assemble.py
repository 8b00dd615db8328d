"""From what workers report to one light rollout, and from its samples to the optimiser steps of each rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.types import Advantages, Rollout
from vla_rl.runtime.rollouts.play import Played

Array = np.ndarray[Any, Any]
LIGHT = ("rewards", "terminated", "truncated", "valid")
CHOSEN = ("log_probs", "fresh_log_probs", "values", "next_values", "versions")
"""Fields of a rollout that simulators fill, and those that policies fill."""


@frozen(kw_only=True, eq=False)
class Samples:
    """The trainable samples (chunk steps) of a rollout, in time-major order."""

    steps: Array
    columns: Array
    """int64 [S]: t and n."""
    workers: Array
    places: Array
    """int64 [S]: worker whose policy made it, and its place there."""


@frozen(kw_only=True, eq=False)
class Gathered:
    """A rollout, and where its heavy parts lie."""

    rollout: Rollout
    """Its light part."""
    places: Array
    """int64 [T, N]: of each chunk step with its worker; -1: there is none."""
    workers: Array
    numbers: Array
    """int64 [N]: the worker of each ticket's policy, and the ticket's number."""


def assemble(step: int, tickets: Sequence[tuple[int, Played]], group_size: int) -> Gathered:
    """One rollout of tickets, in the order of their numbers: (worker, what came of it) of each."""
    workers = np.array([worker for worker, _ in tickets], np.int64)
    parts = [{**ticket.finished.light, **ticket.chosen} for _, ticket in tickets]
    length = max(len(part["valid"]) for part in parts)

    def gather(key: str, fill: float = 0) -> torch.Tensor | None:
        if key not in parts[0]:
            return None
        sample = parts[0][key]
        out = np.full((length, len(parts), *sample.shape[1:]), fill, sample.dtype)
        for column, part in enumerate(parts):
            out[: len(part[key]), column] = part[key]
        return torch.from_numpy(out)

    first = [ticket.finished.episodes[0] if ticket.finished.episodes else None for _, ticket in tickets]
    numbers = np.array([ticket.finished.number for _, ticket in tickets], np.int64)
    tensors = {key: gather(key) for key in (*LIGHT, *CHOSEN)}
    places = gather("sample", fill=-1)
    assert places is not None
    rollout = Rollout(
        step=step,
        groups=torch.from_numpy(numbers // group_size),
        success=torch.tensor([episode is not None and episode.success_once for episode in first]),
        episodes=tuple(episode for _, ticket in tickets for episode in ticket.finished.episodes),
        features=torch.from_numpy(np.stack([p["features"] for p in parts])) if "features" in parts[0] else None,
        tasks=tuple(episode.task for episode in first if episode is not None) if all(first) else (),
        **tensors,  # type: ignore[arg-type]
    )
    return Gathered(rollout=rollout, places=places.numpy(), workers=workers, numbers=numbers)


def ages(rollout: Rollout, version: int) -> dict[int, float]:
    """Versions that the weights have moved on since chunks were chosen -> the share of these chunks."""
    found, counts = (version - rollout.versions[rollout.samples]).unique(return_counts=True)
    return dict(zip(found.tolist(), (counts / counts.sum()).tolist(), strict=True))


def mixed_versions(rollout: Rollout) -> float:
    """Share of the trajectories in which more than one version acted."""
    samples, versions = rollout.samples, rollout.versions
    lowest = versions.masked_fill(~samples, torch.iinfo(torch.int64).max).min(0).values
    highest = versions.masked_fill(~samples, -1).max(0).values
    return float((highest > lowest).float().mean())


def find_samples(rollout: Rollout, columns: Array, gathered: Gathered) -> Samples:
    """Samples of a rollout that was cut to `columns`, in time-major order."""
    steps, kept = np.nonzero(rollout.samples.numpy())
    own = columns[kept]
    return Samples(steps=steps, columns=kept, workers=gathered.workers[own], places=gathered.places[steps, own])


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
