"""What plugins of kind "data" share: windows of chunks over episodes, statistics, and demonstrations in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy


class StepWindows:
    """The samples of episodes: each step that a whole chunk follows, episode by episode. The last C - 1 steps of an
    episode begin none, as OpenVLA-OFT trains."""

    def __init__(self, lengths: Sequence[int], chunk: int) -> None:
        """Raises UserError when no episode is as long as a chunk."""
        counts = np.maximum(np.asarray(lengths, np.int64) - chunk + 1, 0)
        self._ends = np.cumsum(counts)
        if not len(counts) or not self._ends[-1]:
            longest = max(lengths, default=0)
            raise UserError(
                f"none of {len(lengths)} episodes holds a chunk of {chunk} actions; the longest has {longest}"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def find(self, indices: Array) -> tuple[Array, Array]:
        """Samples int64 [B] -> (episode, step within it), int64 [B] each."""
        episodes = np.searchsorted(self._ends, indices, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return episodes, indices - starts[episodes]


def statistics(features: Mapping[str, Array]) -> dict[str, dict[str, tuple[float, ...]]]:
    """For `Demonstrations.data_statistics`: of arrays [steps, D], over all steps; std with divisor n, as OpenVLA's and
    lerobot's files have it."""
    found = {}
    for name, array in features.items():
        values = array.astype(np.float64)
        rows = {
            "mean": values.mean(0),
            "std": values.std(0),
            "min": values.min(0),
            "max": values.max(0),
            "q01": np.quantile(values, 0.01, axis=0),
            "q99": np.quantile(values, 0.99, axis=0),
        }
        found[name] = {key: tuple(row.tolist()) for key, row in rows.items()}
    return found


def check_fit(source: str, env: EnvInfo | None, action_dim: int, state_dim: int) -> EnvInfo:
    """Raise UserError unless demonstrations have the numbers of this simulator. -> it."""
    if env is None:
        raise UserError(f"{source} is opened for a simulator: Context.env is needed")
    for what, here, there in (("action", action_dim, env.action_dim), ("state", state_dim, env.state_dim)):
        if here != there:
            raise UserError(
                f"{source}: its {what}s have {here} numbers and the simulator's have {there}; "
                "choose demonstrations of this robot"
            )
    return env


def check_sample(source: str, data: Demonstrations, simulator: str, env: EnvInfo, chunk: int) -> None:
    """Raise UserError unless the first sample has the shapes that the simulator has, and the chunk that was asked for.
    The model resizes images."""
    if data.num_samples() < 1:
        raise UserError(f"{source} has no samples")
    obs, actions = data.read_samples(np.zeros(1, np.int64))
    state = None if obs.state is None else tuple(obs.state.shape)
    for what, found, wanted in (
        ("actions", tuple(actions.shape), (1, chunk, env.action_dim)),
        ("states", state, (1, env.state_dim) if env.state_dim else None),
        ("cameras", sorted(obs.images), sorted(env.cameras)),
        ("instructions", len(obs.instructions), 1),
    ):
        if found != wanted:
            raise UserError(
                f"{source} does not go with {simulator}: the {what} of a sample are {found}, and {wanted} is wanted "
                f"({simulator} has {env.action_dim} numbers an action, {env.state_dim} in its state, cameras "
                f"{', '.join(env.cameras)}; rollout.chunk is {chunk}); fix the data plugin, or choose its file or key "
                f"for this simulator"
            )


def check_finite(source: str, what: str, values: Array, episodes: Array, steps: Array) -> None:
    """Raise UserError for the first row of `values` [rows, D] that is not finite, a step of an episode each."""
    broken = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(broken):
        row = broken[0]
        raise UserError(
            f"{source}: {what} of episode {episodes[row]}, step {steps[row]} is not finite: {values[row].tolist()}; "
            f"repair or leave out such episodes ({len(np.unique(episodes[broken]))} in all)"
        )


def match_cameras(
    source: str, env: EnvInfo, known: Sequence[str], wanted: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The simulator's cameras -> names in the data: those of the spec's `cameras`, where the plugin has such a key
    (`wanted`), else equal ones. Raises UserError for a camera that one of the two lacks."""
    for camera in wanted or ():
        if camera not in env.cameras:
            raise UserError(
                f"cameras: the simulator has no camera {camera!r}{did_you_mean(camera, env.cameras)}\n"
                f"  it has: {', '.join(env.cameras)}"
            )
    chosen = {camera: (wanted or {}).get(camera, camera) for camera in env.cameras}
    for camera, name in chosen.items():
        if name not in known:
            remedy = "choose cameras in `env`"
            if wanted is not None:
                remedy = f"say which is which in `cameras: {{{camera}: ...}}`"
            raise UserError(
                f"{source} has no images {name!r} for camera {camera!r}{did_you_mean(name, known)}\n"
                f"  it has: {', '.join(known) or 'none'}; {remedy}"
            )
    return chosen


class InMemoryDataset(Demonstrations):
    """Samples in memory."""

    def __init__(self, parts: Sequence[tuple[Observation, Any]]) -> None:
        self._obs = Observation.concat([obs for obs, _ in parts])
        self._actions = np.concatenate([to_numpy(actions) for _, actions in parts])

    def num_samples(self) -> int:
        return len(self._actions)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        return self._obs.take(indices), self._actions[indices]
