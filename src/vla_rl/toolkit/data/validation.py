"""Validation of a data plugin's samples against the simulator: types, shapes, bounds, finite numbers, instructions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, DataProperties, EnvInfo, Observation, RecordedRewards, make_contiguous, to_numpy
from vla_rl.toolkit.data.samples import find_narrow_quantiles, widen_narrow_quantiles

Sizes = Mapping[str, tuple[int, ...]]
"""Image sizes by camera, (height, width)."""
STATISTICS = ("mean", "std", "min", "max", "q01", "q99")
ROUNDING = 0.01
"""Tolerance for actions outside the simulator's bounds, as a share of the range, since recorded numbers are rounded."""
FAR_OUTSIDE = 0.25
"""Share of the range beyond which training refuses actions: their units or their numbers are wrong."""
PROBES = 8
"""Samples that are checked before training begins."""
WARNINGS = 5
"""Most instructions that training warns about."""
NO_NUMBERS: Mapping[str, Sequence[float]] = dict.fromkeys(STATISTICS, ())
logger = logging.getLogger(__name__)


@frozen
class Flaw:
    """A problem of samples or statistics."""

    where: str
    """Sample and key that have the problem."""
    expected: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got}; {self.remedy}"


def sample_flaws(
    env: EnvInfo, chunk: int, indices: Array, obs: Observation, actions: Any, sizes: Sizes, outside: float = ROUNDING
) -> Iterator[Flaw]:
    """Yield the problems of these samples, each kind once, with the first sample that has it.

    Args:
        sizes: image sizes of other samples.
        outside: tolerance for actions outside the bounds, as a share of the range.
    """
    count = len(indices)
    yield from _array_flaws(indices, actions, (count, chunk, env.action_dim), "actions")
    if tuple(actions.shape) == (count, chunk, env.action_dim):
        yield from _bounds_flaws(env, indices, to_numpy(actions), outside)
    missing = [camera for camera in env.cameras if camera not in obs.images]
    if missing:
        got = f"only {list(obs.images)}"
        yield Flaw(f"sample {indices[0]}, images", f"cameras {list(env.cameras)}", got, "name them as the simulator")
    for camera, image in obs.images.items():
        yield from _image_flaws(indices, camera, image, sizes)
    if env.state_dim:
        yield from _array_flaws(indices, obs.state, (count, env.state_dim), "states")
    texts: Any = obs.instructions  # Any: a plugin may return another type
    if not isinstance(texts, tuple | list) or len(texts) != count:
        got = "one text" if isinstance(texts, str) else f"{len(texts)}"
        yield Flaw(f"sample {indices[0]}, instructions", f"a tuple of {count} texts", got, "give one for each sample")
        return
    for index, text in zip(indices, texts, strict=True):
        if not isinstance(text, str) or not text.strip():
            yield Flaw(f"sample {index}, instruction", "a text", repr(text), "say the task; decode bytes")
            break


def _array_flaws(indices: Array, array: Any, shape: tuple[int, ...], what: str) -> Iterator[Flaw]:
    """Yield the problems of actions or states (`what`)."""
    actual = None if array is None else f"{_format_dtype(array)} {list(np.shape(to_numpy(array)))}"
    expected = f"float32 {list(shape)}"
    if actual != expected:
        yield Flaw(
            f"samples {indices[0]} to {indices[-1]}, {what}", f"{what} {expected}", str(actual), "convert or reshape"
        )
        if actual is None or list(np.shape(to_numpy(array))) != list(shape):
            return
    values = to_numpy(array)
    broken = np.argwhere(~np.isfinite(values))
    if len(broken):
        first, *place = (int(i) for i in broken[0])
        got = f"{values[tuple(broken[0])]} (number {place[-1]}); {len(set(broken[:, 0].tolist()))} of {len(indices)} so"
        yield Flaw(f"sample {indices[first]}, {what}", f"finite {what}", got, "repair or leave out those steps")


def _bounds_flaws(env: EnvInfo, indices: Array, actions: Array, outside: float) -> Iterator[Flaw]:
    low, high = (np.asarray(bound, np.float64) for bound in (env.action_low, env.action_high))
    excess = np.maximum(actions - high, low - actions) / (high - low)
    if not len(excess) or np.nanmax(excess, initial=0.0) <= outside:
        return
    sample, step, number = (int(i) for i in np.unravel_index(np.nanargmax(excess), excess.shape))
    many = int((excess > outside).any((1, 2)).sum())
    yield Flaw(
        f"sample {indices[sample]}, actions",
        f"number {number} within {low[number]:g} and {high[number]:g}, the simulator's bounds",
        f"{actions[sample, step, number]:g} ({many} of {len(indices)} samples are outside)",
        "give actions in the simulator's units, scale them or choose its data set",
    )


def _image_flaws(indices: Array, camera: str, image: Any, sizes: Sizes) -> Iterator[Flaw]:
    where = f"samples {indices[0]} to {indices[-1]}, images of {camera!r}"
    shape, count = tuple(np.shape(to_numpy(image))), len(indices)
    actual = f"{_format_dtype(image)} {list(shape)}"
    if _format_dtype(image) != "uint8" or len(shape) != 4 or shape[0] != count or shape[3] != 3:
        yield Flaw(where, f"uint8 [{count}, H, W, 3]", actual, "convert or turn them")
    elif camera in sizes and shape[1:3] != sizes[camera]:
        expected = f"{sizes[camera][0]} x {sizes[camera][1]} pixels as in other samples"
        got = f"{shape[1]} x {shape[2]}"
        yield Flaw(where, expected, got, "resize them, or leave out those episodes (the data's key `episodes`)")


def _format_dtype(array: Any) -> str:
    return str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")


def statistics_flaws(env: EnvInfo, statistics: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[Flaw]:
    """Yield the problems of statistics: numbers that are missing, not finite, or in an impossible order."""
    for part, dim in (("action", env.action_dim), ("state", env.state_dim)):
        where = f"data_statistics, {part}"
        if part not in statistics:
            if part == "action" or dim:
                yield Flaw(where, f"statistics of the {part}s", "none", "add them")
            continue
        rows = {name: np.asarray(statistics[part].get(name, ()), np.float64) for name in STATISTICS}
        lengths = {name: row.size for name, row in rows.items()}
        if set(lengths.values()) != {dim}:
            yield Flaw(where, f"{dim} numbers each", str(lengths), "give one for each dimension")
            continue
        yield from _order_flaws(where, rows)


def _order_flaws(where: str, rows: Mapping[str, Array]) -> Iterator[Flaw]:
    for name, row in rows.items():
        if not np.isfinite(row).all():
            number = int(np.flatnonzero(~np.isfinite(row))[0])
            yield Flaw(where, f"finite numbers in {name!r}", f"{row[number]} (number {number})", "leave out such steps")
            return
    minimum, maximum = rows["min"], rows["max"]
    slack = 1e-6 + 1e-5 * np.maximum(np.abs(minimum), np.abs(maximum))
    order = ("min", "q01", "q99", "max")
    pairs = [("min", "max"), ("q01", "q99"), *pairwise(order), ("min", "mean"), ("mean", "max")]
    for low, high in pairs:
        columns = np.flatnonzero(rows[low] > rows[high] + slack)
        if len(columns):
            number = int(columns[0])
            got = f"{rows[low][number]:g} and {rows[high][number]:g} (number {number})"
            yield Flaw(where, f"{low} <= {high}", got, "compute them again over all steps")
            return
    std = rows["std"]
    columns = np.flatnonzero((std < 0) | ((std == 0) & (maximum > minimum + slack)) | (std > maximum - minimum + slack))
    if len(columns):
        number = int(columns[0])
        got = f"std {std[number]:g} with min {minimum[number]:g} and max {maximum[number]:g} (number {number})"
        yield Flaw(where, "a deviation above 0 and no larger than the range", got, "compute them again over all steps")


def unknown_instruction(env: EnvInfo, text: str) -> str:
    """Describe an instruction that no task of the simulator gives; empty if one does."""
    instructions = [task.instruction for task in env.tasks]
    if text in instructions or any(task.instruction_varies for task in env.tasks):
        return ""
    return f"{text!r}, which the simulator never says{did_you_mean(text, instructions)}"


class CheckedDemonstrations(Demonstrations):
    """Demonstrations, compared with the simulator as they are read: a mismatch is refused, with sample and key."""

    def __init__(self, data: Demonstrations, source: str, simulator: str, env: EnvInfo, chunk: int) -> None:
        """Check a few samples. Raise UserError if one of them does not match the simulator.

        Args:
            source: the data set in words, for messages.
            simulator: the simulator in words, for messages.
        """
        self._data = data
        self._source = source
        self._simulator = simulator
        self._env = env
        self._chunk = chunk
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._warned: set[str] = set()
        probes = np.unique(np.linspace(0, data.num_samples() - 1, PROBES).astype(np.int64))
        instruction_of = {index: self._read_checked(np.array([index]))[0].instructions[0] for index in probes.tolist()}
        strange = {index: text for index, text in instruction_of.items() if unknown_instruction(env, text)}
        if len(strange) == len(instruction_of):
            index, text = next(iter(strange.items()))
            instructions = ", ".join(repr(task.instruction) for task in env.tasks[:3]) + ", ..." * (len(env.tasks) > 3)
            raise UserError(
                f"{source} does not go with {simulator}: sample {index} has the instruction "
                f"{unknown_instruction(env, text)}; the same holds for the other {len(instruction_of) - 1} samples\n"
                f"  {simulator} says: {instructions}\n"
                "  choose its data set, or let the data plugin give the simulator's instruction for each task"
            )
        self._warn_unknown(instruction_of)

    def num_samples(self) -> int:
        return self._data.num_samples()

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        obs, actions = self._read_checked(np.asarray(to_numpy(indices)))
        self._warn_unknown(dict(zip(to_numpy(indices).tolist(), obs.instructions, strict=True)))
        return obs, actions

    def recorded_actions(self, indices: Any) -> Array | None:
        return self._data.recorded_actions(indices)

    def read_rewards(self, indices: Any, discount: float) -> RecordedRewards:
        recorded = self._data.read_rewards(indices, discount)
        wrong = np.flatnonzero(~np.isfinite(recorded.rewards))
        if len(wrong):
            index = int(to_numpy(indices)[wrong[0]])
            raise UserError(f"{self._source}: the rewards after sample {index} are not finite; repair that episode")
        return recorded

    def data_statistics(self) -> Mapping[str, Mapping[str, Sequence[float]]]:
        return self._check_statistics(self._data.data_statistics())

    def relative_statistics(self, references: Sequence[int | None]) -> Mapping[str, Mapping[str, Sequence[float]]]:
        return self._check_statistics(self._data.relative_statistics(references))

    def _check_statistics(
        self, statistics: Mapping[str, Mapping[str, Sequence[float]]]
    ) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Return statistics whose quantiles can scale each number. Raise UserError for impossible ones."""
        for flaw in statistics_flaws(self._env, statistics):
            raise UserError(f"{self._source}, {flaw}")
        for part in ("action", "state"):
            for number, text in find_narrow_quantiles(statistics.get(part, NO_NUMBERS)).items():
                logger.warning(
                    "%s: %s %d: %s; models that scale by quantiles scale it by its smallest and largest number",
                    *(self._source, part, number, text),
                )
        return {part: widen_narrow_quantiles(rows) for part, rows in statistics.items()}

    def data_properties(self) -> DataProperties:
        return self._data.data_properties()

    def _read_checked(self, indices: Array) -> tuple[Observation, Array]:
        try:
            obs, actions = self._data.read_samples(indices)
        except UserError:
            raise
        except Exception:
            if len(indices) > 1:
                for index in indices:  # if one sample differs from the others, it is named
                    self._read_checked(np.array([index]))
            raise
        for flaw in sample_flaws(self._env, self._chunk, indices, obs, actions, self._sizes, FAR_OUTSIDE):
            raise UserError(f"{self._source} does not go with {self._simulator}: {flaw}")
        self._sizes |= {name: tuple(image.shape[1:3]) for name, image in obs.images.items()}
        return obs.contiguous(), make_contiguous(actions)

    def _warn_unknown(self, instruction_of: Mapping[int, str]) -> None:
        for index, text in instruction_of.items():
            if text in self._warned or len(self._warned) >= WARNINGS or not unknown_instruction(self._env, text):
                continue
            self._warned.add(text)
            unknown = unknown_instruction(self._env, text)
            logger.warning("%s: sample %d has the instruction %s", self._source, index, unknown)
