"""Reads the numbers of the chosen episodes, and compares episodes with what `meta/` and their clocks say."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from attrs import frozen
from pyarrow.parquet import ParquetFile

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.data.lerobot.meta import EpisodeMeta, Meta, check_files
from vla_rl.toolkit.data.arrow import arrow_name
from vla_rl.toolkit.data.episodes import EpisodeFilter, EpisodeLabels, exclude_remedy, format_numbers
from vla_rl.toolkit.data.inspection.recorded import DataFinding

INDEX_COLUMNS = ("episode_index", "frame_index", "task_index", "timestamp")
"""Columns that say which episode, frame, task and time a row of the table belongs to."""
SUCCESS = "next.success"
"""Feature that is above 0 at frames of success."""
RATE = 0.1
"""Most difference between the frame rate of an episode's clock and that of the data set, as a share of the latter."""
CORRECT = "correct the column timestamp"
logger = logging.getLogger(__name__)


@frozen(kw_only=True, eq=False)
class RecordedFrames:
    """Rows of the chosen episodes, episode by episode and frame by frame."""

    episodes: list[EpisodeMeta]
    """Episodes in the order of their rows; each has at least one."""
    files: list[Path]
    """Data files of the episodes."""
    table: dict[str, Array]
    """Columns: vectors float32 [rows, size], and those of `INDEX_COLUMNS` [rows]."""
    order: Array
    """Position of each row among all rows of `files`, int64 [rows]."""
    first: Array
    """First row of each episode, int64 [episodes]."""

    @property
    def episode_lengths(self) -> Array:
        """Rows of each episode, int64 [episodes]."""
        return np.diff([*self.first, len(self.order)])

    @property
    def last_rows(self) -> Array:
        """Last row of each episode, int64 [episodes]."""
        return self.first + self.episode_lengths - 1


def choose_episodes(folder: Path, meta: Meta, chosen: EpisodeFilter, videos: Collection[str]) -> list[EpisodeMeta]:
    """Return the episodes whose number the key `episodes` takes, without those that have no frames. Log what is left
    out. Raise UserError for an episode without one of these video features."""
    numbers = [episode.index for episode in meta.episodes]
    indices = set(chosen.select_episodes(str(folder), numbers))
    episodes = [episode for episode in meta.episodes if episode.index in indices]
    for name in videos:
        absent = [episode.index for episode in episodes if episode.length != 0 and name not in episode.clips]
        if absent:
            raise UserError(
                f"{folder}: episodes {format_numbers(absent)} have no video of {name!r}; leave them out: "
                f"{exclude_remedy(absent)}"
            )
    gaps = max(numbers) + 1 - len(numbers)
    empty = [episode.index for episode in episodes if episode.length == 0]
    unused = {name for name in meta.video_names if any(name not in e.clips for e in episodes if e.length != 0)}
    for left_out, text in (
        (gaps, f"{gaps} of the episodes 0 to {max(numbers)} are not there; the others are read"),
        (empty, f"episodes {format_numbers(empty)} have no frames and are left out"),
        (unused, f"some episodes have no video of {', '.join(sorted(unused))}, which no camera reads"),
    ):
        if left_out:
            logger.warning("%s: %s", folder, text)
    if len(empty) == len(episodes):
        raise UserError(f"{folder}: none of the chosen episodes has frames")
    return [episode for episode in episodes if episode.length != 0]


def read_rows(
    folder: Path, meta: Meta, episodes: Sequence[EpisodeMeta], columns: dict[str, int], videos: Collection[str]
) -> RecordedFrames:
    """Read the rows of these episodes. Raise UserError for missing files, for episodes with other rows than `meta/`
    says, and for clocks that do not fit.

    Args:
        columns: vectors to read, and their sizes.
        videos: video features whose frames are read by the clock.
    """
    where = str(folder)
    check_files(folder, episodes, videos)
    files = list(dict.fromkeys(episode.data for episode in episodes))
    table = read_columns(where, files, columns)
    order = np.lexsort((table["frame_index"], table["episode_index"]))
    order = order[np.isin(table["episode_index"][order], [episode.index for episode in episodes])]
    table = {name: column[order] for name, column in table.items()}
    refuse_first(where, find_row_faults(table, episodes))
    unknown = sorted(set(table["task_index"].tolist()) - set(meta.tasks))
    if unknown:
        raise UserError(f"{where}: rows are of tasks {unknown}, which meta/ does not name; download it again")
    rows = group_rows(files, table, order, episodes)
    refuse_first(where, find_clock_faults(rows, meta.fps, bool(videos)))
    return rows


def group_rows(
    files: list[Path], table: dict[str, Array], order: Array, episodes: Sequence[EpisodeMeta]
) -> RecordedFrames:
    """Return sorted rows with the episodes that they belong to, each of which is among `episodes`."""
    indices, first = np.unique(table["episode_index"], return_index=True)
    of_index = {episode.index: episode for episode in episodes}
    return RecordedFrames(
        episodes=[of_index[index] for index in indices.tolist()], files=files, table=table, order=order, first=first
    )


def choose_rows(
    files: list[Path], table: dict[str, Array], order: Array, episodes: Sequence[EpisodeMeta]
) -> RecordedFrames:
    """Return those of sorted rows that belong to these episodes."""
    chosen = np.isin(table["episode_index"], [episode.index for episode in episodes])
    return group_rows(files, {name: column[chosen] for name, column in table.items()}, order[chosen], episodes)


def select_by_labels(where: str, meta: Meta, rows: RecordedFrames, chosen: EpisodeFilter) -> RecordedFrames:
    """Return the rows of the episodes whose tasks and success the key `episodes` takes.

    Args:
        rows: with the column `SUCCESS` if `chosen.needs_success`.
    """
    spans = [slice(first, last + 1) for first, last in zip(rows.first.tolist(), rows.last_rows.tolist(), strict=True)]
    contents = [
        EpisodeLabels(
            number=episode.index,
            instructions=frozenset(meta.tasks[task] for task in set(rows.table["task_index"][span].tolist())),
            success=bool((rows.table[SUCCESS][span] > 0).any()) if chosen.needs_success else None,
        )
        for episode, span in zip(rows.episodes, spans, strict=True)
    ]
    positions = chosen.select_labelled(where, contents)
    if len(positions) == len(contents):
        return rows
    return choose_rows(rows.files, rows.table, rows.order, [rows.episodes[position] for position in positions])


def refuse_first(where: str, findings: Iterable[DataFinding]) -> None:
    """Raise UserError with the first of the findings, if there is one, and the key that leaves its episodes out."""
    for finding in findings:
        leave_out = exclude_remedy(finding.episodes)
        raise UserError(f"{where}: {finding.message}; {finding.remedy}, or leave such episodes out: {leave_out}")


def read_columns(where: str, files: Sequence[Path], sizes: dict[str, int]) -> dict[str, Array]:
    """Return the columns of all rows of the files, in order: the vectors named in `sizes` as float32 [rows, size], and
    the columns `INDEX_COLUMNS` as [rows]. Each file is read with its own types, which may differ."""
    try:
        parts = [_read_file(file, sizes) for file in files]
    except (OSError, ValueError, LookupError, pa.ArrowException) as exc:
        raise UserError(f"{where}: its rows cannot be read ({exc}); download it again") from exc
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read_file(file: Path, sizes: dict[str, int]) -> dict[str, Array]:
    table = ParquetFile(arrow_name(file)).read(columns=[*sizes, *INDEX_COLUMNS])
    index_columns = {name: _read_index_column(name, table[name]) for name in INDEX_COLUMNS}
    return index_columns | {name: _read_vectors(name, table[name], size) for name, size in sizes.items()}


def _read_index_column(name: str, column: Any) -> Array:
    """Return a Parquet column of `INDEX_COLUMNS` as integers or seconds [rows]. Raise ValueError for missing or
    non-finite numbers."""
    values: Array = column.to_numpy()
    if column.null_count or values.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {column.type} with {column.null_count} empty rows, a number in each is expected")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} is not finite in each row")
    if name == "timestamp" or values.dtype.kind != "f":
        return values
    if (values != np.round(values)).any():
        raise ValueError(f"{name} is {column.type} with fractions, whole numbers are expected")
    return values.astype(np.int64)  # pandas' floats


def find_row_faults(table: dict[str, Array], episodes: Sequence[EpisodeMeta]) -> Iterator[DataFinding]:
    """Yield episodes with other rows than meta/ lists, and those in which a frame between two others is missing or
    duplicated. Rows are sorted."""
    indices, counts = np.unique(table["episode_index"], return_counts=True)
    rows = dict(zip(indices.tolist(), counts.tolist(), strict=True))
    different = [e for e in episodes if not rows.get(e.index) or e.length not in (None, rows[e.index])]
    if different:
        episode = different[0]
        listed = "it" if episode.length is None else f"{episode.length} of them"
        yield DataFinding(
            subject="rows",
            message=f"there are {rows.get(episode.index, 'no')} rows of episode {episode.index}, meta/ lists {listed}",
            remedy="download it again",
            episodes=tuple(e.index for e in different),
        )
    jumps = np.flatnonzero((np.diff(table["episode_index"]) == 0) & (np.diff(table["frame_index"]) != 1))
    if len(jumps):
        frame, following = table["frame_index"][jumps[0] : jumps[0] + 2]
        yield DataFinding(
            subject="rows",
            message=f"in episode {table['episode_index'][jumps[0]]} frame {following} follows frame {frame}, "
            "and a chunk needs frames without a gap",
            remedy="repair them",
            episodes=tuple(np.unique(table["episode_index"][jumps]).tolist()),
        )


def find_clock_faults(rows: RecordedFrames, fps: float, by_clock: bool) -> Iterator[DataFinding]:
    """Yield episodes with another frame rate than the data set's and, where frames of videos are found by the clock
    (`by_clock`), those whose clock does not begin with the episode, or jumps."""
    times, frames = rows.table["timestamp"].astype(np.float64), rows.table["frame_index"]
    starts, ends, indices = times[rows.first], times[rows.last_rows], np.array([e.index for e in rows.episodes])
    spans = (frames[rows.last_rows] - frames[rows.first]) / fps
    other = (spans > 0) & (abs(ends - starts - spans) > np.maximum(RATE * spans, 0.5 / fps))
    if other.any():
        episode = int(np.flatnonzero(other)[0])
        seconds = ends[episode] - starts[episode]
        rate = f"{spans[episode] * fps / seconds:.3g}" if seconds > 0 else "no"
        yield DataFinding(
            subject="clock",
            message=f"the clock of episode {indices[episode]} gives {rate} frames a second, meta/info.json says "
            f"{fps:g}, and one policy cannot learn both",
            remedy=CORRECT,
            episodes=tuple(indices[other].tolist()),
        )
    if not by_clock:
        return
    running = abs(starts - frames[rows.first] / fps) > 0.5 / fps
    if running.any():
        episode = int(np.flatnonzero(running)[0])
        yield DataFinding(
            subject="clock",
            message=f"the clock of episode {indices[episode]} begins at {starts[episode]:.3f} s, as if it ran on from "
            "an episode before, and frames of its videos are found by it",
            remedy=CORRECT,
            episodes=tuple(indices[running].tolist()),
        )
    due = np.repeat(starts, rows.episode_lengths) + (frames - np.repeat(frames[rows.first], rows.episode_lengths)) / fps
    jumps = np.flatnonzero(abs(times - due) > 0.5 / fps)
    if len(jumps):
        row = jumps[0]
        yield DataFinding(
            subject="clock",
            message=f"in episode {rows.table['episode_index'][row]} the clock of frame {frames[row]} says "
            f"{times[row]:.3f} s, and at {fps:g} frames a second it is due at {due[row]:.3f} s",
            remedy=CORRECT,
            episodes=tuple(np.unique(rows.table["episode_index"][jumps]).tolist()),
        )


def _read_vectors(name: str, column: Any, size: int) -> Array:
    """Return a Parquet column of lists (nested ones too), or of one number per row, as float32 [rows, size]."""
    rows = len(column)
    if hasattr(column.type, "value_type"):
        lengths_by_level = []
        while hasattr(column.type, "value_type"):
            lengths_by_level.append(pc.unique(pc.list_value_length(column)).to_pylist())
            column = pc.list_flatten(column)
        if (
            any(len(lengths) != 1 for lengths in lengths_by_level)
            or math.prod(lengths[0] for lengths in lengths_by_level) != size
        ):
            lengths = lengths_by_level[0] if len(lengths_by_level) == 1 else lengths_by_level
            raise ValueError(f"{name} has lists of {lengths} numbers, meta/info.json says {size}")
    values: Array = column.to_numpy().reshape(rows, size)
    return values.astype(np.float32)
