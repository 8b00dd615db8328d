"""Comparison of observations after a reset and after the first action: units, colours, orientation, order. A simulator
often has two statuses that make observations, one for resets and one for steps. What the two show of nearly the same
scene differs by no more than what later actions change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from vla_rl.core.types import Array
from vla_rl.testing.env_checks.player import Player
from vla_rl.testing.env_checks.traces import EnvTrace

EPISODES, ACTIONS = 6, 6
"""Episodes that are looked at, at least, and single actions of each."""
FEWEST = 3
"""Episodes of two actions or more that are needed."""
VISIBLE = 0.2
"""Mean differences of images, of 255, that are looked into."""
JUMP = 5.0
"""Ratio to the largest later change from which a change by the first action is of another kind."""
SAME = "make both with one function"
UNITS = (180 / np.pi, 1000.0, 100.0, 255.0, 10.0, 2.54, 2.0)
"""Factors between units, for numbers that are the same in each state."""

Change = Callable[[Mapping[str, Array], str], Array]
"""Function of (images of all cameras after a reset, a camera): the image of the camera, changed as a plugin may do."""


def check_first_actions(player: Player) -> None:
    """Play a few single actions from several states, and compare the first change with the later ones."""
    states = player.spread_states
    max_actions = min(ACTIONS, *(player.step_limit(state) for state in states[:EPISODES]))
    if max_actions < 2:
        player.notice("not seen: whether resets and steps show the same; an episode is one action")
        return
    traces: list[EnvTrace] = []
    length, count = player.affordable_chunks(0.02, 2, max_actions), len(player.env_ids)
    for index in range(-(-EPISODES // count)):
        scripts = {}
        for env_id in player.env_ids:
            state, kind = states[(index * count + env_id) % len(states)], ("random", "extreme")[(env_id + index) % 2]
            scripts[env_id] = player.make_script(state, kind, length, key=50 + index)
        traces += player.roll_out(scripts, widths=[1] * length).values()
        if index and player.is_slow:
            break
    traces = [trace for trace in traces if len(trace) > 1]
    if len(traces) < FEWEST:
        player.notice("not seen: whether resets and steps show the same; episodes are too short")
        return
    for camera in player.info.cameras:
        _compare_images(player, traces, camera)
    if player.info.state_dim:
        _compare_numbers(player, traces)
        _compare_delays(player, traces)


# ------------------------------------------------------------------------------------------------------ images


def _compare_images(player: Player, traces: Sequence[EnvTrace], camera: str) -> None:
    where, expected = f"reset: image {camera!r}", "the same view and colours as after a step"
    brightest = [max(int(trace.views[0].images[camera].max()) for trace in traces)]
    brightest.append(max(int(view.images[camera].max()) for trace in traces for view in _ordered_views(trace)[1:]))
    if min(brightest) <= 1 < max(brightest) and min(brightest) > 0:
        got = f"other numbers (up to {brightest[0]}, and up to {brightest[1]} after steps)"
        player.expect(False, where, expected, got, f"multiply by 255 in both; {SAME}")
        return
    explained = {
        name_of: _explained_distance(traces, camera, change)
        for name_of, change in _possible_changes(player, camera).items()
    }
    name_of = min(explained, key=lambda name: explained[name])
    if explained[name_of] < np.inf:
        player.expect(False, where, expected, name_of, SAME)
        return
    first = [_image_change(trace, camera, 0) for trace in traces]
    later = [_image_change(trace, camera, t) for trace in traces for t in range(1, len(trace))]
    if len(later) >= 2 * FEWEST and max(later) > 0 and min(first) > max(JUMP * max(later), 10 * VISIBLE):
        got = f"{min(first):.2g} of 255 on average, and later ones {max(later):.2g} at most"
        player.expect(False, where, "about as large a change by the first action as by later ones", got, SAME)


def _image_change(trace: EnvTrace, camera: str, t: int) -> float:
    one, two = (trace.views[i].images[camera].astype(np.float32) for i in (t, t + 1))
    return float(np.abs(one - two).mean())


def _possible_changes(player: Player, camera: str) -> dict[str, Change]:
    """Return the changes that a plugin may make to the images of resets or of steps only, by their description."""
    sizes = player.info.cameras
    changes: dict[str, Change] = {
        "colours in another order (RGB and BGR)": lambda images, name: images[name][..., ::-1],
        "an image upside down": lambda images, name: images[name][::-1],
        "a mirrored image": lambda images, name: images[name][:, ::-1],
        "an image turned by 180 degrees": lambda images, name: images[name][::-1, ::-1],
        "inverted colours": lambda images, name: 255 - images[name],
    }
    if sizes[camera][0] == sizes[camera][1]:
        changes["height and width exchanged"] = lambda images, name: images[name].transpose(1, 0, 2)
        changes["an image turned by 90 degrees"] = lambda images, name: np.rot90(images[name])
        changes["an image turned by 270 degrees"] = lambda images, name: np.rot90(images[name], 3)
    for other in sizes:
        if other != camera and sizes[other] == sizes[camera]:
            changes[f"the image of camera {other!r}"] = _image_of(other)
    return changes


def _image_of(camera: str) -> Change:
    return lambda images, name: images[camera]


def _explained_distance(traces: Sequence[EnvTrace], camera: str, change: Change) -> float:
    """Return the distance between images after the reset, with `change` applied, and those after the first action.
    Return infinity unless the change brings them as near as later images are to each other, and unchanged ones are
    farther."""
    features: tuple[Callable[[Array], Array], ...] = (
        lambda image: image,
        lambda image: image.mean(1),
        lambda image: image.mean(0),
        lambda image: image.mean((0, 1)),
    )
    pairs = []
    for trace in traces:
        changed = change(trace.views[0].images, camera).astype(np.float32)
        pairs.append((changed, [view.images[camera].astype(np.float32) for view in _ordered_views(trace)]))
    for feature in features:
        unchanged = np.array([np.abs(feature(images[0]) - feature(images[1])).mean() for _, images in pairs])
        other = np.array([np.abs(feature(changed) - feature(images[1])).mean() for changed, images in pairs])
        later = np.mean(
            [np.abs(feature(a) - feature(b)).mean() for _, images in pairs for a, b in pairwise(images[1:])]
        )
        if unchanged.mean() < max(VISIBLE, 1.6 * later) or (other >= unchanged).any():
            continue
        if other.mean() < min(0.6 * unchanged.mean(), 1.25 * later + 0.02 * unchanged.mean() + 0.01):
            return float(np.mean([np.abs(changed - images[1]).mean() for changed, images in pairs]))
    return np.inf


def _ordered_views(trace: EnvTrace) -> list[Any]:
    return [trace.views[t] for t in range(len(trace) + 1)]


# ----------------------------------------------------------------------------------------------------- numbers


def _compare_numbers(player: Player, traces: Sequence[EnvTrace]) -> None:
    states = [np.stack([view.state for view in _ordered_views(trace)]).astype(np.float64) for trace in traces]
    start, after = np.stack([s[0] for s in states]), np.stack([s[1] for s in states])
    first = np.abs(after - start)
    later = np.max([np.abs(np.diff(s[1:], axis=0)).max(0) for s in states if len(s) > 2] or [0 * first[0]], axis=0)
    where, expected = "reset: state", "the same units and numbers as after a step"
    scaled = {}
    for number in range(start.shape[1]):
        factor = _scale_factor(start[:, number], after[:, number], later[number])
        if factor is not None:
            scaled[number] = factor
    if scaled:
        number, factor = next(iter(scaled.items()))
        numbers = ", ".join(map(str, scaled))
        got = f"numbers that the first action multiplies by {factor:.4g} (number {numbers})"
        player.expect(False, where, expected, got, SAME)
        return
    slack = 1e-3 * np.maximum(np.abs(after).max(0), 1e-3)
    moved = later > slack
    still = ~moved & (first > slack).all(0) & (np.ptp(after, axis=0) > slack)
    jumped = moved & (np.median(first, axis=0) > JUMP * later)
    if still.any() and not (start != start[0]).any():
        got = f"the same after the reset of each of {len(traces)} episodes, and other numbers after the first action"
        player.expect(False, where, expected, got, "read the state after the scene was set up")
    elif still.any() or (jumped.sum() > 1 and jumped.sum() >= 0.5 * moved.sum()):
        number = int(np.flatnonzero(still | jumped)[0])
        got = (
            f"{start[0, number]:.4g} and, one action later, {after[0, number]:.4g} in number {number}, "
            f"which later actions change by {later[number]:.2g} at most"
        )
        player.expect(False, where, expected, got, SAME)
    elif jumped.any():
        numbers = ", ".join(str(i) for i in np.flatnonzero(jumped))
        player.notice(f"the first action changes number {numbers} of the state {JUMP:g} times as much as any later one")


def _scale_factor(start: Array, after: Array, later: float) -> float | None:
    """Return the factor that the first action scales a number by in every episode; None if no factor fits."""
    size = float((start**2).sum())
    if size < 1e-8:
        return None
    factor = float((start * after).sum()) / size
    rest = np.abs(after - factor * start).max()
    if not (factor < 0.6 or factor > 1.7) or np.abs(after).max() < 1e-8:
        return None
    if rest > 1.5 * later + 1e-4 * np.abs(after).max() or np.abs(after - start).max() < max(3 * later, 4 * rest, 1e-3):
        return None
    varied = np.ptp(start) > 0.2 * np.abs(start).max()
    is_unit = any(abs(factor / unit - 1) < 0.05 or abs(factor * unit - 1) < 0.05 for unit in UNITS)
    return factor if varied or is_unit or factor < -0.5 else None


def _compare_delays(player: Player, traces: Sequence[EnvTrace]) -> None:
    """Images and state show the first action at the same time."""
    long = [trace for trace in traces if len(trace) > 2]
    if len(long) < FEWEST:
        return

    def images_change(trace: EnvTrace, t: int) -> bool:
        one, two = trace.views[t].images, trace.views[t + 1].images
        return any(not np.array_equal(one[name], two[name]) for name in one)

    def state_change(trace: EnvTrace, t: int) -> float:
        one, two = trace.views[t].state, trace.views[t + 1].state
        return 0.0 if one is None or two is None else float(np.abs(two - one).max())

    late_images = not any(images_change(t, 0) for t in long) and np.mean([images_change(t, 1) for t in long]) >= 0.75
    moves = np.median([state_change(t, 0) for t in long])
    usual = np.median([state_change(t, 1) for t in long])
    if late_images and moves > 0.3 * usual > 0:
        got = f"images of the reset, in each of {len(long)} episodes, with a state that has changed"
        player.expect(False, "chunk_step", "images after the last action", got, "draw after the physics' step")
    late_state = max(state_change(t, 0) for t in long) == 0.0 and usual > 0
    if late_state and np.mean([images_change(t, 0) for t in long]) >= 0.75:
        got = f"the state of the reset, in each of {len(long)} episodes, with images that have changed"
        player.expect(False, "chunk_step", "the state after the last action", got, "read it after the physics' step")
