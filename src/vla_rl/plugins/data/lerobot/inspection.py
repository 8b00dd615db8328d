"""Opens a data set for `vla-rl data`: reads what can be read of each episode, and says what cannot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.data.lerobot.config import LeRobotConfig
from vla_rl.plugins.data.lerobot.episode_list import read_meta
from vla_rl.plugins.data.lerobot.frames import (
    INDEX_COLUMNS,
    RecordedFrames,
    choose_rows,
    find_clock_faults,
    find_row_faults,
    read_columns,
)
from vla_rl.plugins.data.lerobot.meta import INFO, EpisodeMeta, Meta, check_files, find_folder, pixels_of
from vla_rl.plugins.data.lerobot.video import Videos, find_clip_faults, open_container
from vla_rl.toolkit.data.arrow import arrow_name
from vla_rl.toolkit.data.feature_statistics import QUANTILES
from vla_rl.toolkit.data.images import decode_image
from vla_rl.toolkit.data.inspection.recorded import DataFinding, InspectedEpisode, RecordedData
from vla_rl.toolkit.json_files import read_record

NUMERIC = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
INDICES = ["episode_index", "frame_index"]
COUNTED = ("index", *INDEX_COLUMNS)
DEFAULTS = LeRobotConfig(folder=Path())
STATED = ("mean", "std", "min", "max", *QUANTILES)


def open_recordings(folder: Path) -> RecordedData:
    """Open a LeRobot folder, or a data set of the hub on this machine. Raise UserError if `meta/` cannot be read."""
    folder = find_folder(folder)
    meta = read_meta(folder)
    findings: list[DataFinding] = []
    rows = _read_whole_episodes(folder, meta, findings)
    clock_faults = list(find_clock_faults(rows, meta.fps, bool(meta.video_names)))
    findings += clock_faults
    untimed = {number for finding in clock_faults for number in finding.episodes}
    wrong = np.isin(rows.table["episode_index"], list(untimed))
    rows.table["timestamp"] = np.where(wrong, rows.table["frame_index"] / meta.fps, rows.table["timestamp"])
    findings += _compare_counts(folder, meta, rows)
    if DEFAULTS.action not in rows.table:
        raise UserError(f"{folder} has no feature {DEFAULTS.action!r} with actions; it has: {', '.join(meta.features)}")
    cameras = []
    pixels: dict[str, int] = {}
    for name, feature in meta.features.items():
        if not feature.is_image:
            continue
        try:
            pixels[name] = pixels_of(folder, name, feature)
        except UserError as exc:
            findings.append(DataFinding(subject=name, message=str(exc).partition(": ")[2]))
            continue
        cameras.append(name)
    for name in [camera for camera in cameras if camera in meta.video_names]:
        without = tuple(episode.index for episode in rows.episodes if name not in episode.clips)
        if without:
            findings.append(DataFinding(subject=name, message="has no video", episodes=without))
        if len(without) == len(rows.episodes):
            cameras.remove(name)
            continue
        filmed = _leave_out(rows, {*untimed, *without})
        try:
            short = list(find_clip_faults(filmed, meta.fps, {name: pixels[name]}))
            findings += short
            filmed = _leave_out(filmed, {number for finding in short for number in finding.episodes})
            findings += _find_frame_faults(filmed, meta.fps, name)
        except UserError as exc:
            findings.append(DataFinding(subject=name, message=str(exc)))
            cameras.remove(name)
    return RecordedData(
        folder=folder,
        layout="LeRobot",
        fps=meta.fps,
        episodes=_split_episodes(rows, meta),
        action=DEFAULTS.action,
        state=DEFAULTS.state if DEFAULTS.state in rows.table else None,
        cameras=cameras,
        read_image=ImageReader(rows, meta, pixels).read_image,
        names={name: feature.names for name, feature in meta.features.items() if feature.names},
        statistics=_read_statistics(folder, rows),
        findings=findings,
    )


class ImageReader:
    """Reads single images of videos and of Parquet files."""

    def __init__(self, rows: RecordedFrames, meta: Meta, pixels: Mapping[str, int]) -> None:
        self._episodes = {episode.index: episode for episode in rows.episodes}
        self._first = dict(zip(self._episodes, rows.first.tolist(), strict=True))
        self._times = rows.table["timestamp"].astype(np.float64)
        self._videos = Videos(meta.fps, max(pixels.values(), default=1))
        self._pixels = pixels
        self._filmed = set(meta.video_names)
        self._rows_of_groups: dict[Path, list[tuple[Array, Array]]] = {}
        """Parquet file -> episode and frame of each row, for each of its row groups."""
        self._group: tuple[Path, int, str] | None = None
        self._images: Any = None
        """Images of one row group of a Parquet file and camera."""

    def read_image(self, episode: InspectedEpisode, camera: str, frame: int) -> Array:
        """Return an image, uint8 [H, W, 3]. Raise UserError where it cannot be read."""
        listed = self._episodes[episode.number]
        if camera in self._filmed:
            if camera not in listed.clips:
                raise UserError("it has no video")
            clip = listed.clips[camera]
            return self._videos.read_frame(clip.path, clip.start + self._times[self._first[listed.index] + frame])
        data = self._find_stored(listed, camera, frame)
        try:
            return decode_image(data or b"", self._pixels[camera])
        except ValueError as exc:
            raise UserError(f"an image cannot be decoded ({exc})") from exc

    def _find_stored(self, listed: EpisodeMeta, camera: str, frame: int) -> bytes | None:
        file = pq.ParquetFile(arrow_name(listed.data))
        if listed.data not in self._rows_of_groups:
            groups = [file.read_row_group(group, columns=INDICES) for group in range(file.num_row_groups)]
            self._rows_of_groups[listed.data] = [
                (one[INDICES[0]].to_numpy(), one[INDICES[1]].to_numpy()) for one in groups
            ]
        for group, (episodes, frames) in enumerate(self._rows_of_groups[listed.data]):
            matches = np.flatnonzero((episodes == listed.index) & (frames == frame))
            if not len(matches):
                continue
            if self._group != (listed.data, group, camera):
                self._images = file.read_row_group(group, columns=[camera])[camera]
                self._group = (listed.data, group, camera)
            return (self._images[int(matches[0])].as_py() or {}).get("bytes")
        return None


def _read_whole_episodes(folder: Path, meta: Meta, findings: list[DataFinding]) -> RecordedFrames:
    """Return the rows of the episodes that can be read, and add what is wrong with others to `findings`."""
    sizes = {
        name: int(np.prod(feature.shape, dtype=np.int64))
        for name, feature in meta.features.items()
        if feature.dtype in NUMERIC and name not in COUNTED
    }
    by_file: dict[Path, list[EpisodeMeta]] = defaultdict(list)
    for episode in meta.episodes:
        by_file[episode.data].append(episode)
    tables, readable = [], []
    for file, episodes in by_file.items():
        try:
            check_files(folder, episodes, ())
            tables.append(read_columns(str(folder), [file], sizes))
        except UserError as exc:
            text = str(exc).splitlines()[0].removeprefix(f"{folder}: ").partition("; download it again")[0]
            findings.append(DataFinding(subject="rows", message=text, episodes=tuple(e.index for e in episodes)))
            continue
        readable += episodes
    if not tables:
        raise UserError(f"{folder}: none of its rows can be read: {findings[0].message}")
    table = {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}
    order = np.lexsort((table["frame_index"], table["episode_index"]))
    table = {name: column[order] for name, column in table.items()}
    unlisted = sorted(set(table["episode_index"].tolist()) - {episode.index for episode in meta.episodes})
    if unlisted:
        findings.append(
            DataFinding(subject="rows", message="has rows, and meta/ does not list it", episodes=tuple(unlisted))
        )
    findings += find_row_faults(table, [e for e in readable if e.length != 0])
    unknown = ~np.isin(table["task_index"], list(meta.tasks))
    if unknown.any():
        numbers = tuple(np.unique(table["episode_index"][unknown]).tolist())
        findings.append(DataFinding(subject="task", message="has a task that meta/ does not name", episodes=numbers))
    empty = tuple(episode.index for episode in meta.episodes if episode.length == 0)
    if empty:
        findings.append(DataFinding(subject="rows", message="has no frames", episodes=empty))
    return choose_rows(list(by_file), table, order, readable)


def _leave_out(rows: RecordedFrames, numbers: Collection[int]) -> RecordedFrames:
    """Return the rows of the other episodes."""
    kept = [episode for episode in rows.episodes if episode.index not in numbers]
    return choose_rows(rows.files, rows.table, rows.order, kept)


def _compare_counts(folder: Path, meta: Meta, rows: RecordedFrames) -> Iterator[DataFinding]:
    """Yield counts of meta/info.json that are not those of the lists and rows."""
    info = read_record(folder / INFO)
    actual = {"total_episodes": len(meta.episodes), "total_frames": len(rows.order), "total_tasks": len(meta.tasks)}
    for name, count in actual.items():
        stated = info.data.get(name)
        if isinstance(stated, int) and stated != count:
            yield DataFinding(subject="meta/info.json", message=f"states {name} {stated}, and there are {count}")


def _find_frame_faults(rows: RecordedFrames, fps: float, name: str) -> Iterator[DataFinding]:
    """Yield clips with another number of frames than their episode, by the times in the file, which is not decoded."""
    times: dict[Path, Array] = {}
    different: dict[int, tuple[int, int]] = {}
    for episode, length in zip(rows.episodes, rows.episode_lengths.tolist(), strict=True):
        clip = episode.clips[name]
        if clip.path not in times:
            times[clip.path] = _read_frame_times(clip.path)
        begin, end = np.searchsorted(
            times[clip.path], [clip.start - 0.5 / fps, clip.start + (length - 0.5) / fps], side="left"
        )
        if end - begin != length:
            different[episode.index] = int(end - begin), length
    if different:
        number, (frames, length) = next(iter(different.items()))
        yield DataFinding(
            subject=name,
            message=f"its video holds {frames} frames in the {length / fps:.2f} s of episode {number}, which has "
            f"{length}",
            episodes=tuple(different),
        )


def _read_frame_times(file: Path) -> Array:
    """Return the times of a video's frames, sorted, float64 [frames], in seconds."""
    with open_container(file) as container:
        stream = container.streams.video[0]
        base = float(stream.time_base or 0)
        try:
            times = [packet.pts * base for packet in container.demux(stream) if packet.pts is not None]
        except av.FFmpegError as exc:
            raise UserError(f"{file} cannot be read to its end ({exc.strerror})") from exc
    return np.sort(np.array(times))


def _split_episodes(rows: RecordedFrames, meta: Meta) -> list[InspectedEpisode]:
    table = rows.table
    vectors = {name: column for name, column in table.items() if name not in INDEX_COLUMNS}
    episodes = []
    for episode, first, last in zip(rows.episodes, rows.first.tolist(), rows.last_rows.tolist(), strict=True):
        times = table["timestamp"][first : last + 1].astype(np.float64)
        episodes.append(
            InspectedEpisode(
                number=episode.index,
                task=meta.tasks.get(int(table["task_index"][first]), "unknown"),
                times=times - times[0],
                vectors={name: column[first : last + 1] for name, column in vectors.items()},
            )
        )
    return episodes


def _read_statistics(folder: Path, rows: RecordedFrames) -> dict[str, dict[str, Array]]:
    """Return the statistics of meta/stats.json for the vectors that were read; none where it cannot be read."""
    file = folder / "meta" / "stats.json"
    if not file.is_file():
        return {}
    try:
        stated = read_record(file).data
        return {
            name: {key: np.asarray(stated[name][key], np.float64).reshape(-1) for key in STATED if key in stated[name]}
            for name in rows.table
            if name not in INDEX_COLUMNS and name in stated
        }
    except (UserError, ValueError, TypeError):
        return {}
