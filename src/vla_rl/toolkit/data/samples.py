"""Shared parts of plugins of kind "data": windows of chunks over episodes, statistics, and demonstrations in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, EnvInfo, Observation, RecordedRewards, to_numpy
from vla_rl.toolkit.data.episodes import exclude_remedy, format_numbers
from vla_rl.toolkit.feature_names import check_order
from vla_rl.toolkit.relative_actions import take_offsets

RATE = 0.1
"""Least difference between the rates of data and simulator that is reported, as a share."""
CLEARLY, FAR = 4, 0.5
"""How many times farther from the state than from 0 an episode's actions are, and how many standard deviations of all
states from it, if they count as differences."""
STILL = 1e-6
"""Standard deviation below which a number of the state does not move."""
NARROW = 0.01
"""Share of a number's range from minimum to maximum below which that of its quantiles is too small to scale by."""
WITHOUT_CHUNK, MANY = 0.1, 0.2
"""Share of the steps without a whole chunk after them from which a line says so, and from which it names `ends`."""
REMEDY = "; the data's key `ends` (repeat, mask) takes all steps"

logger = logging.getLogger(__name__)


class StepWindows:
    """Samples of episodes: each step that a whole chunk follows, so not the last C - 1 of an episode (OpenVLA-OFT)."""

    def __init__(self, lengths: Sequence[int], chunk: int, source: str = "the data", shortened: str = "") -> None:
        """Count the samples; log if many steps or whole episodes give none. Raise UserError if no episode has a chunk.

        Args:
            source: the data set, for messages.
            shortened: what made episodes shorter than they were recorded, for messages.
        """
        self._lengths = np.asarray(lengths, np.int64)
        counts = np.maximum(self._lengths - chunk + 1, 0)
        self._ends = np.cumsum(counts)
        if not len(counts) or not self._ends[-1]:
            longest = max(lengths, default=0)
            raise UserError(
                f"{source}: none of {len(lengths)} episodes holds a chunk of {chunk} actions; the longest has {longest}"
                f"{shortened}; set rollout.chunk to {longest} or less{REMEDY}"
                if longest
                else f"{source}: {len(lengths)} episodes have no steps{shortened}"
            )
        steps, unread = sum(lengths), int((counts == 0).sum())
        without = 1 - len(self) / steps
        if unread or without > WITHOUT_CHUNK:
            left_out = f"; {unread} of {len(counts)} episodes are shorter and left out" if unread else ""
            remedy = REMEDY if unread or without > MANY else ""
            text = "%s: %d of %d steps are samples, which %d actions follow%s%s"
            logger.warning(text, source, len(self), steps, chunk, left_out, remedy)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate_samples(self, indices: Array) -> tuple[Array, Array]:
        """Return (episode, step within it), int64 [B] each, of samples int64 [B]."""
        episodes = np.searchsorted(self._ends, indices, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return episodes, indices - starts[episodes]

    def count_actions(self, indices: Array, chunk: int) -> Array:
        """Return how many of the next C actions samples int64 [B] have in their episodes, int64 [B]."""
        episodes, steps = self.locate_samples(indices)
        counts: Array = np.minimum(self._lengths[episodes] - steps, chunk)
        return counts

    def sum_rewards(
        self, indices: Array, rewards: Array, rows: Array, last: Array, stride: int, discount: float
    ) -> RecordedRewards:
        """Return what followed samples int64 [B].

        Args:
            rewards: reward of every row of all episodes, float32 [rows].
            rows, last: rows of the samples, and the last ones of their episodes, int64 [B].
            stride: rows from a sample to the one that follows it.
        """
        last_samples = self._ends[np.searchsorted(self._ends, indices, side="right")] - 1
        follows = indices + stride <= last_samples
        ends = np.where(follows, rows + stride - 1, last)
        longest = int((ends - rows).max(initial=0)) + 1
        sums = np.zeros(len(rows), np.float64)
        for offset in range(longest):
            within = rows + offset <= ends
            sums[within] += discount**offset * rewards[rows[within] + offset]
        return RecordedRewards(
            rewards=sums.astype(np.float32), following=np.where(follows, indices + stride, -1).astype(np.int64)
        )


def compute_statistics(features: Mapping[str, Array]) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return statistics of arrays [steps, D] for `data_statistics`; std with divisor n (OpenVLA, lerobot)."""
    result = {}
    for name, array in features.items():
        values = array.astype(np.float64)
        rows = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
        rows |= {key: np.quantile(values, q, axis=0) for key, q in (("q01", 0.01), ("q99", 0.99))}
        result[name] = {key: tuple(row.tolist()) for key, row in rows.items()}
    return result


def find_narrow_quantiles(statistics: Mapping[str, Any]) -> dict[int, str]:
    """Return the numbers whose quantiles leave out nearly all of their range, such as a gripper that pulses, each with
    a description. `statistics`: those of one feature, as `compute_statistics` returns them."""
    low, high, q01, q99 = (np.asarray(statistics[name], np.float64) for name in ("min", "max", "q01", "q99"))
    ends = np.where(high - q99 >= q01 - low, high, low)
    return {
        number: f"99 % of the steps lie in {q01[number]:.6g} to {q99[number]:.6g}, it reaches {ends[number]:.6g}"
        for number in np.flatnonzero(q99 - q01 < NARROW * (high - low)).tolist()
    }


def widen_narrow_quantiles(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a feature's statistics, minimum and maximum in place of too near quantiles, which would cut off values."""
    result = dict(statistics)
    numbers = list(find_narrow_quantiles(statistics))
    for quantile, end in (("q01", "min"), ("q99", "max")) if numbers else ():
        values = list(statistics[quantile])
        for number in numbers:
            values[number] = statistics[end][number]
        result[quantile] = tuple(values)
    return result


def compute_relative_statistics(
    source: str, episodes: Mapping[int, tuple[Array, Array]], references: Sequence[int | None], chunk: int, ends: str
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return what `Demonstrations.relative_statistics` does: over all samples of these episodes, of each the chunk's
    actions minus the state of its first step. Raise UserError where no episode is as long as a chunk, and for recorded
    actions that are differences already.

    Args:
        source: the data set, for messages.
        episodes: number -> actions float32 [T, A], or recorded chunks [T, C, A], and states float32 [T, S].
        references: as in `relative_statistics`.
        ends: "drop": samples are the steps that a whole chunk follows, as lerobot counts; otherwise all steps, with
            the last action repeated, as openpi counts.
    """
    _check_absolute(source, episodes, references)
    counts = {
        number: len(actions) if actions.ndim == 3 or ends != "drop" else max(len(actions) - chunk + 1, 0)
        for number, (actions, _) in episodes.items()
    }
    if not any(counts.values()):
        raise UserError(f"none of the {len(episodes)} episodes of {source} holds a chunk of {chunk} actions")
    action, steps = [], []
    for number, place in enumerate(references):  # one at a time: all differences are chunk times the data
        parts = []
        for episode, (actions, states) in episodes.items():
            offsets = take_offsets(states[: counts[episode]], (place,))
            parts.append(_take_windows(actions[..., number], counts[episode], chunk) - offsets)
        differences: Array = np.concatenate(parts)
        action.append(compute_statistics({"": differences.reshape(-1, 1)})[""])
        steps.append(compute_statistics({"": differences})[""])
    states = np.concatenate([states for _, states in episodes.values()])
    return {
        "action": {name: tuple(column[name][0] for column in action) for name in action[0]},
        "action_steps": {
            name: tuple(np.stack([column[name] for column in steps], axis=1).reshape(-1).tolist()) for name in steps[0]
        },
        **compute_statistics({"state": states}),
    }


def _take_windows(numbers: Array, count: int, chunk: int) -> Array:
    """Return the first `count` chunks [count, C] of a number of actions, [T] or [T, C]; the last one is repeated."""
    if numbers.ndim == 2:
        return numbers
    following = np.arange(count)[:, None] + np.arange(chunk)
    windows: Array = numbers[np.minimum(following, len(numbers) - 1)]
    return windows


def _check_absolute(source: str, episodes: Mapping[int, tuple[Array, Array]], references: Sequence[int | None]) -> None:
    """Raise UserError for episodes whose actions look like differences already: far from the state, and near 0."""
    spread = np.concatenate([states for _, states in episodes.values()]).std(0)
    pairs = [(n, place) for n, place in enumerate(references) if place is not None and spread[place] > STILL]
    if not pairs:
        return
    numbers, indices = (list(part) for part in zip(*pairs, strict=True))
    differences = []
    for episode, (actions, states) in episodes.items():
        first = actions[..., 0, :] if actions.ndim == 3 else actions
        wanted, shown = first[:, numbers], states[:, indices]
        to_state, to_zero = (float(np.abs(part / spread[indices]).mean()) for part in (wanted - shown, wanted))
        if to_zero * CLEARLY < to_state and to_state > FAR:
            differences.append(episode)
    if differences:
        some = f"episodes {format_numbers(differences)}" if len(differences) < len(episodes) else "all episodes"
        remedy = "set model.actions: absolute"
        if len(differences) < len(episodes):
            remedy = f"leave those out: {exclude_remedy(differences)}, or convert them"
        raise UserError(
            f"{source}: model.actions asks for differences of its actions to the state, and those in {some} are more "
            f"than {CLEARLY} times as far from the state as from 0: they look like differences already, which would be "
            f"taken twice; {remedy}"
        )


def check_fit(source: str, env: EnvInfo, action_dim: int, state_dim: int) -> EnvInfo:
    """UserError unless demonstrations have this simulator's action and state dimensions. Return its info."""
    for what, size, env_size in (("action", action_dim, env.action_dim), ("state", state_dim, env.state_dim)):
        if size != env_size:
            raise UserError(
                f"{source}: its {what}s have {size} numbers and the simulator's have {env_size}; "
                "choose demonstrations of this robot"
            )
    return env


def check_sample(source: str, data: Demonstrations, simulator: str, env: EnvInfo, chunk: int) -> None:
    """Raise UserError unless the first sample has the simulator's shapes and the requested chunk length, and unless
    numbers with the simulator's names are in its order. Image sizes are not compared, since the model resizes images.
    Log another frame rate and other names than the simulator's."""
    if data.num_samples() < 1:
        raise UserError(f"{source} has no samples")
    obs, actions = data.read_samples(np.zeros(1, np.int64))
    state = None if obs.state is None else tuple(obs.state.shape)
    for what, actual, expected in (
        ("actions", tuple(actions.shape), (1, chunk, env.action_dim)),
        ("states", state, (1, env.state_dim) if env.state_dim else None),
        ("cameras", sorted(obs.images), sorted(env.cameras)),
        ("instructions", len(obs.instructions), 1),
    ):
        if actual != expected:
            raise UserError(
                f"{source} does not go with {simulator}: the {what} of a sample are {actual}, and {expected} is wanted "
                f"({simulator} has {env.action_dim} numbers an action, {env.state_dim} in its state, cameras "
                f"{', '.join(env.cameras)}; rollout.chunk is {chunk}); fix the data plugin, or choose its file or key "
                f"for this simulator"
            )
    properties = data.data_properties()
    for part, names, known in (
        ("action", properties.action_names, env.action_names),
        ("state", properties.state_names, env.state_names),
    ):
        check_order(part, source, names, simulator, known)
        if names and known and {name.casefold() for name in names} != {name.casefold() for name in known}:
            logger.warning(
                "the numbers of the %s have other names in %s (%s) than in %s (%s), and are taken to be the same in "
                "this order: check that, before the robot moves",
                *(part, source, ", ".join(names), simulator, ", ".join(known)),
            )
    if env.control_hz is not None and properties.fps is not None and abs(properties.fps / env.control_hz - 1) > RATE:
        logger.warning(
            "%s has %g actions a second and %s %g: the policy will move at another speed than it was shown",
            *(source, properties.fps, simulator, env.control_hz),
        )


def check_finite(source: str, what: str, values: Array, episodes: Array, steps: Array) -> None:
    """Raise UserError for `values` [rows, D] that are not finite. `episodes`, `steps` (int64 [rows]): their origin."""
    broken = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(broken):
        row = broken[0]
        raise UserError(
            f"{source}: {what} of episode {episodes[row]}, step {steps[row]} is not finite: {values[row].tolist()}; "
            f"repair such episodes ({len(np.unique(episodes[broken]))} in all), or leave them out: "
            f"{exclude_remedy(episodes[broken].tolist())}"
        )


def match_cameras(
    source: str, env: EnvInfo, available: Sequence[str], name_of_camera: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the simulator's cameras -> names in the data: those of `name_of_camera` (the spec's
    `cameras`), if the plugin has such a key, else equal names. Raise UserError for a camera that either side lacks."""
    for camera in name_of_camera or ():
        if camera not in env.cameras:
            raise UserError(
                f"cameras: the simulator has no camera {camera!r}{did_you_mean(camera, env.cameras)}\n"
                f"  it has: {', '.join(env.cameras)}"
            )
    chosen = {camera: (name_of_camera or {}).get(camera, camera) for camera in env.cameras}
    for camera, name in chosen.items():
        if name not in available:
            remedy = "choose cameras in `env`"
            if name_of_camera is not None:
                remedy = f"say which is which in `cameras: {{{camera}: ...}}`"
            raise UserError(
                f"{source} has no images {name!r} for camera {camera!r}{did_you_mean(name, available)}\n"
                f"  it has: {', '.join(available) or 'none'}; {remedy}"
            )
    return chosen


class InMemoryDataset(Demonstrations):
    """Demonstrations in memory."""

    def __init__(self, parts: Sequence[tuple[Observation, Any]]) -> None:
        self._obs = Observation.concat([obs for obs, _ in parts])
        self._actions = np.concatenate([to_numpy(actions) for _, actions in parts])

    def num_samples(self) -> int:
        return len(self._actions)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        return self._obs.take(indices), self._actions[indices]
