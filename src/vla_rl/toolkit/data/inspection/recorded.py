"""Recorded episodes as the inspection of a data set sees them, whatever format they are stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import evolve, field, frozen

from vla_rl.core.types import Array
from vla_rl.toolkit.data.episodes import format_numbers

FEWEST = 4
"""Fewest episodes among which one can be unlike the others."""

REST = 0.05
"""Distance from the first or last value, as a share of a number's usual range, up to which an arm rests."""


@frozen(kw_only=True)
class DataFinding:
    """Something in a data set that a policy should not be trained on."""

    subject: str
    """What it concerns: "clock", "rows", "video", or the name of a feature."""
    message: str
    """What is wrong."""
    remedy: str = ""
    """What to do, other than to leave the episodes out; empty: look at them."""
    episodes: tuple[int, ...] = ()
    """Numbers of the episodes; empty: the whole data set."""
    seconds: float | None = None
    """Time within the first of the episodes; None: all of it."""

    def describe(self) -> str:
        """Return the finding as one line."""
        place = ""
        if self.episodes:
            plural = "s" if len(self.episodes) > 1 else ""
            place = f"episode{plural} {format_numbers(self.episodes)}"
            if self.seconds is not None:
                place += f" at {self.seconds:.2f} s" if len(self.episodes) == 1 else f" (first at {self.seconds:.2f} s)"
            place += ": "
        return f"{self.subject}: {place}{self.message}" + (f"; {self.remedy}" if self.remedy else "")


@frozen(kw_only=True, eq=False)
class InspectedEpisode:
    """Numbers of one episode of T frames."""

    number: int
    task: str
    times: Array
    """float64 [T], seconds from the start of the episode."""
    vectors: Mapping[str, Array]
    """Feature -> float32 [T, D]."""

    def __len__(self) -> int:
        return len(self.times)

    def trim_rest(self, reach: Mapping[str, Array]) -> InspectedEpisode:
        """Return the episode without first and last frames that stay within `reach` (feature -> [D]), if any moves."""
        differ = [
            np.flatnonzero(
                np.any(
                    [(np.abs(self.vectors[n] - self.vectors[n][at]) > r).any(axis=1) for n, r in reach.items()], axis=0
                )
            )
            for at in (0, -1)
        ]
        if not all(map(len, differ)):
            return self
        kept = slice(max(0, int(differ[0][0]) - 1), int(differ[1][-1]) + 2)
        return evolve(self, times=self.times[kept], vectors={name: rows[kept] for name, rows in self.vectors.items()})


@frozen(kw_only=True, eq=False)
class RecordedData:
    """A data set, opened for inspection."""

    folder: Path
    layout: str
    """Name of the format, for people."""
    fps: float | None
    """Frames per second; None: the format does not say."""
    episodes: Sequence[InspectedEpisode]
    action: str
    """Feature with the actions."""
    state: str | None
    """Feature with the state; None: there is none."""
    cameras: Sequence[str]
    read_image: Callable[[InspectedEpisode, str, int], Array]
    """Function of episode, camera and frame that returns uint8 [H, W, 3]. It raises UserError."""
    names: Mapping[str, Sequence[str]] = field(factory=dict)
    """Feature -> names of its numbers, where the data set has them."""
    statistics: Mapping[str, Mapping[str, Array]] = field(factory=dict)
    """Feature -> "mean", "std", "min", "max" and quantiles ("q01") [D] that the folder states for all rows."""
    findings: Sequence[DataFinding] = ()
    """What was wrong when it was opened; episodes that cannot be read are not in `episodes`."""

    def name_number(self, feature: str, index: int) -> str:
        """Return the name of a number of a feature, for messages."""
        names = self.names.get(feature, ())
        return f"number {index} ({names[index]})" if index < len(names) else f"number {index}"

    def name_numbers(self, feature: str, indices: Iterable[int]) -> str:
        """Return the names of numbers of a feature, for messages."""
        indices = list(indices)
        names = self.names.get(feature, ())
        if len(indices) == 1:
            return self.name_number(feature, indices[0])
        named = f" ({', '.join(names[index] for index in indices)})" if len(names) > max(indices) else ""
        return f"numbers {format_numbers(indices)}{named}"

    def split_tasks(self) -> list[RecordedData]:
        """Return the episodes of each task that has `FEWEST`, and of all other tasks together."""
        of_task: dict[str, list[InspectedEpisode]] = {}
        for episode in self.episodes:
            of_task.setdefault(episode.task, []).append(episode)
        large = [episodes for episodes in of_task.values() if len(episodes) >= FEWEST]
        others = [episode for episodes in of_task.values() if len(episodes) < FEWEST for episode in episodes]
        return [evolve(self, episodes=episodes) for episodes in (*large, others) if episodes]

    def measure_rest(self, feature: str) -> Array:
        """Return how far the numbers of a feature move while an arm rests, [D]."""
        spans = [np.ptp(episode.vectors[feature], axis=0) for episode in self.episodes]
        return np.asarray(REST * np.median(spans, axis=0))

    def trim_rest(self) -> RecordedData:
        """Return the episodes without the frames before the first and after the last motion of an action or the state.
        There a number is at one value, without being stuck or at a limit."""
        reach = {name: self.measure_rest(name) for name in (self.action, self.state) if name is not None}
        return evolve(self, episodes=[episode.trim_rest(reach) for episode in self.episodes])

    def stack_rows(self, feature: str) -> Array:
        """Return the rows of all episodes, float32 [rows, D]."""
        return np.concatenate([episode.vectors[feature] for episode in self.episodes])

    @property
    def features(self) -> list[str]:
        """Features with vectors, the action and the state first."""
        if not self.episodes:
            return []
        others = [name for name in self.episodes[0].vectors if name not in (self.action, self.state)]
        first = [name for name in (self.action, self.state) if name is not None]
        return [name for name in (*first, *others) if name in self.episodes[0].vectors]


def group_findings(subject: str, texts: Mapping[int, tuple[str, float | None]]) -> Iterator[DataFinding]:
    """Yield one finding for the episodes with equal texts. `texts`: episode -> text, and the time in seconds."""
    episodes: dict[str, list[int]] = {}
    for number, (text, _) in texts.items():
        episodes.setdefault(text, []).append(number)
    for text, numbers in episodes.items():
        yield DataFinding(subject=subject, message=text, episodes=tuple(numbers), seconds=texts[numbers[0]][1])
