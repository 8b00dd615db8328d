"""`check_data`: do recorded demonstrations keep to the contract of `Demonstrations`?"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.contexts import DataContext
from vla_rl.core.declarations import DataPlugin
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import EnvInfo, Observation, SampleRecord, to_numpy
from vla_rl.testing.common.comparison import same_data
from vla_rl.testing.common.findings import Findings, LeftOut, build_component
from vla_rl.toolkit.data.validation import sample_flaws, statistics_flaws, unknown_instruction

SAMPLES = 96
"""Samples that are read: the first ones, the last ones, and some in between; all of a smaller data set."""
BATCH = 8
LEAST_STEPS, SHOWN = 32, 0.1
"""Steps in which a robot acts: more than this part has to be seen by a camera."""
EXACT, RELATIVE = 1e-6, 1e-4
"""Actions and states may be outside of the statistics' min and max by this much."""


def check_data(data: Demonstrations | DataPlugin, config: Any = None, *, env: EnvInfo, chunk: int = 4) -> None:
    """Read samples and compare them with what `Demonstrations` promises. Raises CheckFailed with all findings.

    Args:
        data: a component that was opened for `env` and `chunk`, or a `DataPlugin` that is opened with
            `config` for them.
        env: of the simulator that the demonstrations are for, `EnvInfo` as it offers it.
    """
    opened: Demonstrations
    opened, name = build_component("data", data, config, DataContext(env=env, chunk=chunk))
    f = Findings(f"check_data of {name}")
    count = 0
    read: Read | None = None
    with f.section("num_samples"):
        count = opened.num_samples()
        f.expect(count >= 1, "num_samples", "at least one sample", count, "refuse empty data when it is opened")
    if count:
        with f.section("read_samples"):
            read = _read_all(f, opened, env, chunk, _choose_indices(count))
        with f.section("read_samples again"):
            _read_again(f, opened, _choose_indices(count)[-BATCH:])
        with f.section("what is shown"):
            if read is None or len(read.indices) < BATCH:
                raise LeftOut("there are few samples")
            _check_variety(f, read)
    with f.section("data_statistics"):
        _check_statistics(f, opened, env, read)
    with f.section("data_properties"):
        properties = opened.data_properties()
        for part, names, dim in (
            ("action", properties.action_names, env.action_dim),
            ("state", properties.state_names, env.state_dim),
        ):
            expected, got = f"{dim} names of the {part}'s numbers, or none", len(names)
            f.expect(got in (0, dim), "data_properties", expected, got, "name each number, in its order")
    f.close()


@frozen(eq=False)
class Read(SampleRecord):
    """Samples that were read, in NumPy, copied."""

    indices: Any
    obs: Any
    actions: Any


def _choose_indices(count: int) -> Any:
    """A run at the beginning, one at the end, and samples spread over the rest."""
    if count <= SAMPLES:
        return np.arange(count)
    third = SAMPLES // 3
    spread = np.linspace(third, count - third - 1, SAMPLES - 2 * third).astype(np.int64)
    return np.concatenate([np.arange(third), spread, np.arange(count - third, count)])


def _read_all(f: Findings, data: Demonstrations, env: EnvInfo, chunk: int, indices: Any) -> Read | None:
    """Read the samples at `indices`. Return those with the right shapes, if any. Report a repeated flaw once."""
    sizes: dict[str, tuple[int, ...]] = {}
    reported: set[tuple[str, str]] = set()
    parts: list[Read] = []
    for first in range(0, len(indices), BATCH):
        block = indices[first : first + BATCH]
        passed = block.copy()
        obs, actions = _read_samples(data, passed)
        same = np.array_equal(passed, block)
        f.expect(same, "read_samples", "its indices unchanged", "others", "copy before you write")
        flaws = list(sample_flaws(env, chunk, block, obs, actions, sizes))
        for flaw in flaws:
            what = flaw.where.partition(", ")[2], flaw.remedy
            if what not in reported:
                reported.add(what)
                f.expect(False, f"read_samples, {flaw.where}", flaw.expected, flaw.got, flaw.remedy)
        unknown = [text for text in obs.instructions if isinstance(text, str) and unknown_instruction(env, text)]
        for text in list(dict.fromkeys(unknown))[:1]:
            remedy = "give the instruction of the task as the simulator says it"
            expected = f"instructions of the simulator: {', '.join(repr(task.instruction) for task in env.tasks[:3])}"
            known = ("instruction", text) in reported
            f.expect(known, "read_samples", expected, unknown_instruction(env, text), remedy)
            reported.add(("instruction", text))
        if not flaws:
            sizes |= {name: tuple(image.shape[1:3]) for name, image in obs.images.items()}
            parts.append(Read(block, *copy.deepcopy((obs.numpy(), to_numpy(actions)))))
    return Read.concat(parts) if parts else None


def _read_samples(data: Demonstrations, indices: Any) -> tuple[Observation, Any]:
    """Samples, those that raise one by one, so that they can be named."""
    try:
        return data.read_samples(indices)
    except Exception:
        for index in indices if len(indices) > 1 else ():
            try:
                data.read_samples(np.array([index]))
            except Exception as exc:
                exc.add_note(f"reading sample {index}")
                raise
        raise


def _read_again(f: Findings, data: Demonstrations, indices: Any) -> None:
    """The same samples, the other way round, and one of them twice."""
    where, count = "read_samples", len(indices)
    raw, raw_actions = data.read_samples(indices)
    obs, actions = copy.deepcopy((raw.numpy(), to_numpy(raw_actions)))
    twice_alike = same_data((obs, actions), data.read_samples(indices))
    f.expect(twice_alike, where, "equal samples twice", "others", "keep no state")
    mixed, turned = data.read_samples(indices[::-1].copy())
    same_order = same_data((obs.take(np.arange(count)[::-1]), actions[::-1]), (mixed, turned))
    f.expect(same_order, where, "samples in the order of the indices", "another order", "follow `indices`")
    twice, same_actions = data.read_samples(indices[[0, 0]])
    alike = same_data((obs.take(np.array([0, 0])), actions[[0, 0]]), (twice, same_actions))
    f.expect(alike, where, "a sample twice where its index comes twice", "others", "follow `indices`")
    unchanged = same_data((obs, actions), (raw, raw_actions))
    f.expect(unchanged, where, "samples that stay as returned", "arrays that a later call changed", "return copies")


def _check_variety(f: Findings, read: Read) -> None:
    """Check that samples differ from each other in the data that should differ."""
    actions, states = read.actions, read.obs.state
    moves = bool((actions != actions[:1]).any())
    f.expect(moves, "read_samples", "actions that differ", f"the same in {len(actions)} samples", "read each step")
    repeated = moves and actions.shape[1] > 1 and bool((actions == actions[:, :1]).all())
    got = f"one action {actions.shape[1]} times, in each of {len(actions)} samples"
    f.expect(not repeated, "read_samples", "actions of the steps that follow each other", got, "read one of each step")
    if states is not None:
        still = moves and not (states != states[:1]).any()
        got = f"the same in {len(states)} samples, whose actions differ"
        remedy = "read that of each step, as the simulator has it"
        f.expect(not still, "read_samples", "states that differ", got, remedy)
    _check_images_change(f, read)
    image_of_camera: dict[str, Any] = {}
    for camera, images in read.obs.images.items():
        still = moves and not (images != images[:1]).any() and bool(images.min() < images.max())
        got = f"the same in {len(images)} samples"
        f.expect(not still, "read_samples", f"images of {camera!r} that differ", got, "read the frame of each step")
        dark = 0 < images.max() <= 1
        f.expect(not dark, f"image {camera!r}", "values from 0 to 255", "nothing above 1", "multiply by 255")
        identical = [
            name
            for name, other in image_of_camera.items()
            if np.array_equal(other, images) and images.min() < images.max()
        ]
        got = f"the images of {identical[0]!r} in each of {len(images)} samples" if identical else ""
        f.expect(not identical, f"image {camera!r}", "its own images", got, "read each camera's")
        image_of_camera[camera] = images


def _check_images_change(f: Findings, read: Read) -> None:
    """Check that images of consecutive samples change with the actions, and not only with the episode."""
    going_on = (np.diff(read.indices) == 1) & (read.actions[1:] != read.actions[:-1]).any((1, 2))
    changed = np.zeros(len(going_on), bool)
    for images in read.obs.images.values():
        changed |= (images[1:] != images[:-1]).reshape(len(changed), -1).any(1)
    steps, shown = int(going_on.sum()), int(changed[going_on].sum())
    differ = any((images != images[:1]).any() for images in read.obs.images.values())  # else reported for each camera
    enough = steps < LEAST_STEPS or not differ or shown > SHOWN * steps
    got = f"a change in {shown} of {steps} steps, whose actions differ"
    f.expect(enough, "read_samples", "images that change during an episode", got, "read the frame of each step")


def _check_statistics(f: Findings, data: Demonstrations, env: EnvInfo, read: Read | None) -> None:
    try:
        statistics = data.data_statistics()
    except UserError as exc:
        raise LeftOut(str(exc)) from exc
    flaws = list(statistics_flaws(env, statistics))
    for flaw in flaws:
        f.expect(False, flaw.where, flaw.expected, flaw.got, flaw.remedy)
    if flaws or read is None:
        return
    for part, rows in (("action", read.actions.reshape(-1, env.action_dim)), ("state", read.obs.state)):
        if part not in statistics or rows is None:
            continue
        low, high = (np.asarray(statistics[part][name]) for name in ("min", "max"))
        slack = EXACT + RELATIVE * np.maximum(np.abs(low), np.abs(high))
        outside = np.flatnonzero(((rows < low - slack) | (rows > high + slack)).any(0))
        if len(outside):
            number = int(outside[0])
            column = rows[:, number]
            got = f"{column.min():g} to {column.max():g} in number {number}"
            expected = f"{part}s from min to max, {low[number]:g} to {high[number]:g}"
            f.expect(False, "data_statistics", expected, got, "work them out over the numbers that samples give")
