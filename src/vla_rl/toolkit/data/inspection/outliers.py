"""Finds episodes whose numbers are unlike those of the other episodes of their task. What no episode can show by itself
(a joint that hardly moves, an action at its limit) is compared with the others, so that a task in which it is normal is
not reported."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vla_rl.core.types import Array
from vla_rl.toolkit.data.inspection.recorded import FEWEST, DataFinding, InspectedEpisode, RecordedData, group_findings
from vla_rl.toolkit.data.inspection.values import LONG, find_switches, measure_limits

STILL, USUALLY_STILL = 0.3, 0.15
"""Shares of an episode for which a number does not change: reported from, and of others at most."""
LIMITED, USUALLY_LIMITED = 0.3, 0.15
"""The same for the share of frames in which a number is at its largest or smallest value."""
REPEATED = 0.05
"""Share of frames that repeat all numbers of the frame before from which an episode is reported."""
RARE = 0.2
"""Share of the episodes above which something is part of the task."""
JUMP = 4.0
"""How many times larger than its neighbours a jump is."""
SHORT = 0.1
"""Share of the usual length below which an episode is reported."""
MARGIN = 0.25
"""Distance from the range of all other episodes, as a share of it, from which numbers are reported."""
LARGER = 15.0
"""Factor between the numbers of an episode and those of others from which they have another unit."""


def find_outliers(data: RecordedData) -> Iterator[DataFinding]:
    """Yield episodes that are unlike the others. Nothing for fewer than `FEWEST`."""
    if len(data.episodes) < FEWEST:
        return
    yield from _find_odd_lengths(data)
    moving = data.trim_rest()
    for feature in data.features:
        if feature in (data.action, data.state):
            yield from _find_still(moving, feature)
            yield from _find_other_ranges(data, feature)
            yield from _find_jumps(data, feature)
    yield from _find_repeats(moving)


def _find_odd_lengths(data: RecordedData) -> Iterator[DataFinding]:
    usual = float(np.median([len(episode) for episode in data.episodes]))
    short = {
        episode.number: (f"has {len(episode)} frames, episodes have {usual:.0f} usually", None)
        for episode in data.episodes
        if usual >= LONG and len(episode) < SHORT * usual
    }
    yield from group_findings("length", short)


def _find_still(data: RecordedData, feature: str) -> Iterator[DataFinding]:
    """Yield episodes in which numbers do not change, or are at a limit, for long."""
    rows = data.stack_rows(feature)
    switch, constant = find_switches(rows), np.ptp(rows, axis=0) == 0
    tolerance = 1e-6 * np.abs(rows).max(axis=0)
    episodes = [episode for episode in data.episodes if len(episode) >= LONG]
    if len(episodes) < FEWEST:
        return
    parts = [episode.vectors[feature] for episode in episodes]
    still = np.array([_longest_still(part, tolerance) for part in parts])
    limited = np.array([measure_limits(part) for part in parts])
    moving = ~switch & ~constant
    stuck = _find_unlike(still, STILL, USUALLY_STILL) & moving
    saturated = _find_unlike(limited, LIMITED, USUALLY_LIMITED) & moving & ~stuck
    unswitched = _find_unlike(still, 0.999, 0.9) & switch & ~constant
    for mask, shares, text in (
        (stuck | unswitched, still, "no change for {share:.0%} of the time, unlike in other episodes"),
        (saturated, limited, "at a limit in {share:.0%} of the frames (saturated), unlike in other episodes"),
    ):
        texts: dict[int, tuple[str, float | None]] = {}
        for row in np.flatnonzero(mask.any(axis=1)).tolist():
            episode = episodes[row]
            indices = np.flatnonzero(mask[row]).tolist()
            share = float(shares[row, indices].max())
            seconds = _still_since(episode, feature, indices[0]) if shares is still else None
            texts[episode.number] = f"{data.name_numbers(feature, indices)}: {text.format(share=share)}", seconds
        yield from group_findings(feature, texts)


def _find_unlike(shares: Array, least: float, usual: float) -> Array:
    """Return where a share [E, D] is at least `least`, although it is at most `usual` in three of four episodes."""
    high = shares >= least
    unlike: Array = high & (np.quantile(shares, 0.75, axis=0) <= usual) & (high.mean(axis=0) <= RARE)
    return unlike


def _find_other_ranges(data: RecordedData, feature: str) -> Iterator[DataFinding]:
    """Yield numbers whose range in an episode is outside that of all others, such as in other units."""
    count = len(data.episodes)
    parts = [episode.vectors[feature] for episode in data.episodes]
    low, high = (np.array([np.quantile(part, q, axis=0) for part in parts]) for q in (0.05, 0.95))
    size = np.array([np.abs(part).max(axis=0) for part in parts])
    usual_size = np.median(size, axis=0)
    texts: dict[int, tuple[str, float | None]] = {}
    for place, episode in enumerate(data.episodes):
        others = np.arange(count) != place
        factor = size[place] / np.maximum(usual_size, 1e-9)
        top, bottom = high[others].max(axis=0), low[others].min(axis=0)
        reach = np.maximum(top - bottom, 1e-6)
        larger = (factor > LARGER) & (usual_size > 1e-6) & (size[place] > 5 * size[others].max(axis=0))
        smaller = (factor < 1 / LARGER) & (usual_size > 1e-6) & (size[place] * 5 < size[others].min(axis=0))
        margin = (MARGIN + FEWEST / (count - 1)) * reach  # few episodes do not show the whole range
        outside = (low[place] > top + margin) | (high[place] < bottom - margin)
        scaled = larger if larger.any() else smaller
        if larger.any() or (smaller.mean() > 0.5 and len(episode) >= LONG):
            indices = np.flatnonzero(scaled).tolist()
            text = f"{data.name_numbers(feature, indices)}: {_name_factor(float(factor[indices[0]]))}"
        elif outside.any() and len(episode) >= LONG:
            indices = np.flatnonzero(outside).tolist()
            text = f"{data.name_numbers(feature, indices)}: outside of the range of all other episodes"
        else:
            continue
        texts[episode.number] = text, None
    if len(texts) <= RARE * count:
        yield from group_findings(feature, texts)


def _name_factor(factor: float) -> str:
    """Return in words how much larger than usual numbers are."""
    for value, words in (
        (180 / np.pi, "degrees where other episodes have radians"),
        (np.pi / 180, "radians where other episodes have degrees"),
        (1000.0, "millimetres where other episodes have metres"),
        (0.001, "metres where other episodes have millimetres"),
    ):
        if 0.6 < factor / value < 1.6:
            return f"{factor:.3g} times as large as usual, like {words}"
    return f"{factor:.3g} times as large as in other episodes"


def _find_jumps(data: RecordedData, feature: str) -> Iterator[DataFinding]:
    """Yield frames between which numbers change far more than around them and elsewhere: spikes, missing frames."""
    rows = data.stack_rows(feature)
    scale = np.where(find_switches(rows), np.inf, np.maximum(rows.std(0), 1e-9))
    changes = [np.linalg.norm(np.diff(e.vectors[feature], axis=0) / scale, axis=1) for e in data.episodes]
    texts: dict[int, tuple[str, float | None]] = {}
    for place, (episode, change) in enumerate(zip(data.episodes, changes, strict=True)):
        if len(episode) < LONG:
            continue
        largest = int(change.argmax())
        near = np.delete(change[max(0, largest - 4) : largest + 5], min(largest, 4))
        calm = np.sort(near)[: max(1, len(near) - 2)]  # a spike changes twice
        usual = np.quantile(np.concatenate([c for i, c in enumerate(changes) if i != place]), 0.999)
        if change[largest] > JUMP * max(float(calm.max()), 1e-9) and change[largest] > 1.5 * usual:
            step = np.abs(np.diff(episode.vectors[feature], axis=0)[largest]) / scale
            text = f"{data.name_number(feature, int(step.argmax()))}: a jump; is a frame wrong, or are frames missing?"
            texts[episode.number] = text, float(episode.times[largest + 1])
    if len(texts) <= RARE * len(data.episodes):
        yield from group_findings(feature, texts)


def _find_repeats(data: RecordedData) -> Iterator[DataFinding]:
    """Yield episodes in which frames repeat all numbers of the frame before."""
    features = [name for name in data.features if name in (data.action, data.state)]
    episodes = [episode for episode in data.episodes if len(episode) >= LONG]
    if len(episodes) < FEWEST:
        return
    shares, first = [], []
    for episode in episodes:
        rows = np.concatenate([episode.vectors[name] for name in features], axis=1)
        equal = (np.diff(rows, axis=0) == 0).all(axis=1)
        shares.append(float(equal.mean()))
        first.append(float(episode.times[int(equal.argmax()) + 1]))
    usual = float(np.quantile(shares, 0.75))
    texts: dict[int, tuple[str, float | None]] = {
        episode.number: (f"{share:.0%} of the frames repeat all numbers of the frame before", seconds)
        for episode, share, seconds in zip(episodes, shares, first, strict=True)
        if share >= max(REPEATED, 4 * usual)
    }
    if len(texts) <= RARE * len(episodes):
        yield from group_findings("rows", texts)


def _longest_still(part: Array, tolerance: Array) -> Array:
    """Return the longest stretch without a change, as a share of the episode, [D]."""
    moves = np.abs(np.diff(part, axis=0)) > tolerance
    longest = np.zeros(part.shape[1])
    for index in range(part.shape[1]):
        edges = np.flatnonzero(np.concatenate([[True], moves[:, index], [True]]))
        longest[index] = (np.diff(edges).max() - 1) / max(1, len(part) - 1)
    return longest


def _still_since(episode: InspectedEpisode, feature: str, index: int) -> float:
    """Return the time at which a number's longest stretch without a change begins, in seconds."""
    column = episode.vectors[feature][:, index]
    edges = np.flatnonzero(np.concatenate([[True], np.diff(column) != 0, [True]]))
    return float(episode.times[min(len(episode) - 1, int(edges[np.diff(edges).argmax()]))])
