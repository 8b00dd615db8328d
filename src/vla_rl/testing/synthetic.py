"""Random data of the right shapes, for checks and for tests of plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from vla_rl.core.fields import Extras, shape_of
from vla_rl.core.randomness import generator
from vla_rl.core.types import (
    Advantages,
    Array,
    Batch,
    Chunk,
    EnvInfo,
    Episode,
    Observation,
    Rollout,
    TaskInfo,
    ValueGranularity,
)

BOUNDS = ((-0.2, 0.3), (0.0, 1.0), (-3.0, 3.0))
"""Bounds of the numbers of a synthetic action, in turn: asymmetric, to expose a model that does not scale."""


def env_info(
    cameras: int = 2,
    pixels: int = 64,
    state_dim: int = 4,
    action_dim: int = 3,
    bounds: Sequence[tuple[float, float]] = BOUNDS,
) -> EnvInfo:
    """Build the description of an environment to build a model for. `bounds` are those of an action's numbers, in turn;
    by default -0.2 to 0.3, 0 to 1 and -3 to 3."""
    each = [bounds[i % len(bounds)] for i in range(action_dim)]
    return EnvInfo(
        cameras={f"camera{i}": (pixels, pixels) for i in range(cameras)},
        state_dim=state_dim,
        action_low=tuple(low for low, _ in each),
        action_high=tuple(high for _, high in each),
        tasks=(
            TaskInfo(name="red", instruction="push the red block", max_steps=20),
            TaskInfo(name="blue", instruction="pick up the blue bowl on the left", max_steps=20),
        ),
    )


def observation(info: EnvInfo, rows: int, seed: int = 0) -> Observation:
    """Noise images, noise state, and the instructions of the tasks in turn."""
    rng = generator(seed, "synthetic observation")
    return Observation(
        images={
            name: rng.integers(0, 256, (rows, height, width, 3), dtype=np.uint8)
            for name, (height, width) in info.cameras.items()
        },
        instructions=tuple(info.tasks[i % len(info.tasks)].instruction for i in range(rows)),
        state=rng.standard_normal((rows, info.state_dim), dtype=np.float32) if info.state_dim else None,
    )


def rollout(
    *,
    chunk_steps: int = 4,
    groups: int = 3,
    group_size: int = 4,
    chunk: int = 3,
    tokens: int = 2,
    values: ValueGranularity = "none",
    successes: bool = True,
    features: int = 0,
    proximal: bool = False,
    seed: int = 0,
    ends: Sequence[int] | None = None,
    won: Sequence[bool] | None = None,
    extras: Mapping[str, str] = MappingProxyType({}),
) -> Rollout:
    """A rollout with one episode a column that ends at any action, by success, failure or step limit, or not at all.

    T = chunk_steps, N = groups * group_size, C = chunk, M = tokens. `successes=False`: no episode succeeds. `proximal`:
    with proximal_log_probs, near the recorded ones. `ends`, `won`: the action (from 1) at which each column ends, and
    whether by success or else by failure, instead of chance; all other numbers are the same whatever these are.
    `extras`: further numbers from 0 to 0.01, as `EnvInfo.extras` declares them.
    """
    rng = generator(seed, "synthetic rollout")
    columns, steps = groups * group_size, chunk_steps * chunk
    last = rng.integers(1, steps + 2, columns)  # counted from 1; steps + 1: the episode continues
    kinds = rng.integers(0, 3, columns)  # success, failure, truncated
    kinds[kinds == 0] = 0 if successes else 1
    last = last if ends is None else np.asarray(ends)
    kinds = kinds if won is None else np.where(won, 0, 1)
    at = np.arange(1, steps + 1)[:, None]
    valid, ending = at <= last, at == last
    rewards = ending & (kinds == 0)

    def to_chunk_steps(array: Array) -> torch.Tensor:
        return torch.from_numpy(array.reshape(chunk_steps, chunk, columns).transpose(0, 2, 1).copy())

    def draw_normals(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))

    def draw_extra(name: str, dims: Sequence[str]) -> torch.Tensor:
        sizes = {"C": chunk, "M": tokens, "A": tokens}
        shape = (chunk_steps, columns, *shape_of(dims, sizes))
        drawn = 0.01 * torch.from_numpy(generator(seed, f"extra {name}").random(shape, dtype=np.float32))
        mask = to_chunk_steps(valid) if dims[:1] == ["C"] else to_chunk_steps(valid).any(-1)
        return drawn * mask.reshape(*mask.shape, *[1] * (drawn.ndim - mask.ndim))

    succeeded = (kinds == 0) & (last <= steps)
    log_probs = -draw_normals(chunk_steps, columns, chunk, tokens).abs()
    drift = generator(seed, "proximal log-probs").standard_normal(log_probs.shape, dtype=np.float32)
    value_shape = (chunk_steps, columns) if values == "chunk" else (chunk_steps, columns, chunk)
    return Rollout(
        step=1,
        rewards=to_chunk_steps(rewards.astype(np.float32)),
        terminated=to_chunk_steps(ending & (kinds < 2)),
        truncated=to_chunk_steps(ending & (kinds == 2)),
        valid=to_chunk_steps(valid),
        log_probs=log_probs,
        proximal_log_probs=log_probs + 0.1 * torch.from_numpy(drift) if proximal else None,
        values=None if values == "none" else draw_normals(*value_shape),
        next_values=None if values == "none" else draw_normals(chunk_steps, columns),
        groups=torch.arange(columns) // group_size,
        success=torch.from_numpy(succeeded),
        versions=torch.zeros(chunk_steps, columns, dtype=torch.int64),
        episodes=tuple(
            Episode(
                number=n,
                episode=0,
                task=f"task-{n // group_size % 2}",
                state=n // group_size,
                steps=int(last[n]),
                total_reward=float(succeeded[n]),
                success_once=bool(succeeded[n]),
                success_at_end=bool(succeeded[n]),
                truncated=bool(kinds[n] == 2),
            )
            for n in range(columns)
            if last[n] <= steps
        ),
        features=draw_normals(columns, features) if features else None,
        extras=Extras({name: draw_extra(name, dims.split()) for name, dims in extras.items()}),
        tasks=tuple(f"task-{n // group_size % 2}" for n in range(columns)),
    )


def batch(rolled: Rollout, advantages: Advantages, info: EnvInfo | None = None, reference: bool = False) -> Batch:
    """The samples of a rollout as one optimiser step, weights divided by their counts as the runtime does. Observation,
    actions and replay are empty shells unless `info` is given: losses see neither."""
    samples = rolled.samples
    size, chunk = int(samples.sum()), rolled.valid.shape[2]
    value_weights = advantages.value_weights
    counts, value_counts = advantages.divisors

    def of_samples(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[samples]

    obs = Observation(images={}, instructions=("",) * size) if info is None else observation(info, size)
    actions = torch.zeros(size, chunk, 1 if info is None else info.action_dim)
    return Batch(
        obs=obs,
        chunk=Chunk(actions=actions, log_probs=rolled.log_probs[samples], values=of_samples(rolled.values)),
        valid=rolled.valid[samples],
        log_probs=rolled.log_probs[samples],
        values=of_samples(rolled.values),
        advantages=advantages.advantages[samples],
        weights=advantages.weights[samples] / counts[samples].sum().clamp_min(1e-12),
        returns=of_samples(advantages.returns),
        value_weights=None
        if value_weights is None or value_counts is None
        else value_weights[samples] / value_counts[samples].sum().clamp_min(1e-12),
        lag=torch.zeros(size, dtype=torch.int64),
        reference_log_probs=rolled.log_probs[samples] - 0.1 if reference else None,
        proximal_log_probs=of_samples(rolled.proximal_log_probs),
        extras=Extras({name: tensor[samples] for name, tensor in {**rolled.extras, **advantages.extras}.items()}),
    )
