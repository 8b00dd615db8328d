"""Writer of data sets in LeRobot's format 3.0, as lerobot 0.4 to 0.6 read it, one episode at a time. Each episode is
its own Parquet file, with its images inside as PNG. Files are written atomically, the data before the lists that name
them, so a folder opens up to the last finished episode whenever its writer is killed."""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attrs import evolve
from PIL import Image

from vla_rl.core import paths
from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.toolkit.data.arrow import arrow_name
from vla_rl.toolkit.data.feature_statistics import QUANTILES, FeatureStatistics
from vla_rl.toolkit.data.recording import Recording
from vla_rl.toolkit.json_files import read_record

VERSION = "v3.0"
FILES_IN_CHUNK = 1000
LISTED = 100
"""Episodes per file of `meta/episodes`, which is rewritten for each of them."""
SHOWN = 16
"""Images per episode and camera from which statistics are computed. They stand for all rows of the episode."""
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
ORIGINS = "meta/vla_rl.jsonl"
"""Identity, task and success of each episode, a line each. They are not columns of `meta/episodes`, since lerobot 0.6.1
cannot open a data set to which it has appended episodes without those columns."""
LOCK = ".lock"
OWN = {"meta", "data", LOCK, "README.md"}
INDICES = {
    "timestamp": ("float32", pa.float32()),
    "frame_index": ("int64", pa.int64()),
    "episode_index": ("int64", pa.int64()),
    "index": ("int64", pa.int64()),
    "task_index": ("int64", pa.int64()),
}

_writers: dict[Path, LeRobotWriter] = {}
"""Open writers of this process, by folder."""


class LeRobotWriter:
    """Appends episodes to a data set, new or not. Other processes are refused, a new writer in this one takes over."""

    def __init__(self, folder: Path, *, fps: int, robot: str) -> None:
        """
        Args:
            fps: rows per second, from which timestamps are computed.
            robot: name of the robot or simulator.
        Raises UserError if another process writes to the folder, and for a folder with anything else in it."""
        self.folder = folder
        self.fps = fps
        self.robot = robot
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if (before := _writers.pop(folder.resolve(), None)) is not None:
            before.close()
        self._lock: Any = (folder / LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(
                f"{folder}: another process writes to this data set; wait for it, or choose another folder"
            ) from None
        self.features: dict[str, Any] | None = None
        """Features of the data set; None: it is empty."""
        self.episodes = self.frames = 0
        self.tasks: dict[str, int] = {}
        self.identities: set[str] = set()
        self._listed: list[dict[str, Any]] = []
        self._origins_size = 0
        """Bytes of `ORIGINS` that are of listed episodes."""
        self._statistics: dict[str, FeatureStatistics] = {}
        self._rows: list[dict[str, Array]] = []
        """Numeric features of episodes, [rows, D] each, which `_read_rows` reads from their files."""
        try:
            if (folder / "meta" / "info.json").is_file():
                self._load_existing()
        except BaseException:
            self._lock.close()
            raise
        _writers[folder.resolve()] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder for other writers; may be called twice."""
        self._lock.close()
        if _writers.get(self.folder.resolve()) is self:
            del _writers[self.folder.resolve()]

    def add(self, recording: Recording) -> bool:
        """Append an episode; return False if it is there. UserError for other features and for a closed writer."""
        if self._lock.closed:
            raise UserError(f"{self.folder}: this writer was closed, or another one has taken over")
        if recording.identity in self.identities:
            return False
        features = features_of(recording)
        self._check_features(features)
        if not len(recording):
            raise UserError(f"{self.folder}: an episode without rows cannot be recorded")
        table, statistics = self._build_table(recording), self._statistics_of(recording)
        if recording.instruction not in self.tasks:
            self.tasks[recording.instruction] = len(self.tasks)
            _write_table(self.folder / "meta" / "tasks.parquet", _tasks_table(self.tasks))
        chunk, file = divmod(self.episodes, FILES_IN_CHUNK)
        _write_table(self.folder / DATA.format(chunk_index=chunk, file_index=file), table)
        self._list_episode(recording, statistics)
        self.features = features
        self.episodes = self.episodes + 1
        self.frames = self.frames + len(recording)
        for name, one in statistics.items():
            self._statistics[name] = self._statistics[name] + one if name in self._statistics else one
        if recording.identity:
            self.identities.add(recording.identity)
        self._write_totals()
        return True

    # ------------------------------------------------------------------------------------------------------ inside

    def _check_features(self, features: Mapping[str, Any]) -> None:
        if self.features is None or features == self.features:
            return
        new, existing = dict(features), dict(self.features)
        different = [
            f"{name}: {_format_feature(new.get(name))} here, {_format_feature(existing.get(name))} there"
            for name in sorted(new.keys() | existing.keys())
            if new.get(name) != existing.get(name)
        ]
        raise UserError(
            f"{self.folder} has episodes of another kind, and a data set has one kind only\n  "
            + "\n  ".join(different)
            + "\n  choose another folder"
        )

    def _build_table(self, recording: Recording) -> Any:
        columns: dict[str, Any] = {
            f"observation.images.{camera}": [
                {"bytes": data, "path": f"frame-{row:06d}.png"} for row, data in enumerate(images)
            ]
            for camera, images in recording.images.items()
        }
        columns |= {name: _build_column(array) for name, array in _numeric_features(recording).items()}
        numbers = self._build_indices(recording)
        return pa.table(columns | {name: pa.array(numbers[name], kind) for name, (_, kind) in INDICES.items()})

    def _build_indices(self, recording: Recording) -> dict[str, Array]:
        """Return the columns of `INDICES`, [n] each."""
        rows = np.arange(len(recording))
        task = self.tasks.get(recording.instruction, len(self.tasks))
        return {
            "timestamp": rows / self.fps,
            "frame_index": rows,
            "episode_index": np.full(len(rows), self.episodes),
            "index": self.frames + rows,
            "task_index": np.full(len(rows), task),
        }

    def _statistics_of(self, recording: Recording) -> dict[str, FeatureStatistics]:
        """Return the statistics of all features: over the rows, and as in lerobot over the actions of a chunk."""
        statistics = {}
        for name, array in (_numeric_features(recording) | self._build_indices(recording)).items():
            numbers = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1).astype(np.float64)
            statistics[name] = evolve(FeatureStatistics.from_rows(numbers, numbers.shape[1:]), count=len(array))
        chosen = np.unique(np.linspace(0, len(recording) - 1, SHOWN).astype(int))
        for camera, images in recording.images.items():
            frames = np.stack([np.asarray(Image.open(io.BytesIO(images[row])).convert("RGB")) for row in chosen])
            statistics[f"observation.images.{camera}"] = evolve(
                FeatureStatistics.of_images(frames), count=len(recording)
            )
        return statistics

    def _list_episode(self, recording: Recording, statistics: Mapping[str, FeatureStatistics]) -> None:
        """Add an episode whose data are written to the list of episodes."""
        index, file = self.episodes, self.episodes // LISTED
        file_of = dict(zip(("chunk_index", "file_index"), divmod(file, FILES_IN_CHUNK), strict=True))
        data_file = dict(zip(("chunk_index", "file_index"), divmod(index, FILES_IN_CHUNK), strict=True))
        line: dict[str, Any] = {
            "episode_index": index,
            "tasks": [recording.instruction],
            "length": len(recording),
            "dataset_from_index": self.frames,
            "dataset_to_index": self.frames + len(recording),
            **{f"data/{name}": number for name, number in data_file.items()},
            **{f"meta/episodes/{name}": number for name, number in file_of.items()},
        }
        origin = {"episode_index": index, "identity": recording.identity, "task": recording.task}
        text = f"{json.dumps(origin | {'success': recording.success})}\n".encode()
        with (self.folder / ORIGINS).open("ab") as lines:
            lines.truncate(self._origins_size)  # an attempt to write this episode may have failed
            lines.write(text)
        for name, one in statistics.items():
            line |= {f"stats/{name}/{key}": value for key, value in one.to_dict().items()}
        listed = [*self._listed, line] if index % LISTED else [line]
        _write_table(self.folder / EPISODES.format(**file_of), pa.Table.from_pylist(listed))
        self._listed = listed
        self._origins_size += len(text)

    def _write_totals(self) -> None:
        numbers = {name: one.to_dict() for name, one in self._statistics.items()}
        self._read_rows()
        for name in self._rows[0] if self._rows else ():
            rows = np.concatenate([episode[name] for episode in self._rows]).astype(np.float64)
            quantiles = np.quantile(rows, list(QUANTILES.values()), axis=0)  # episodes' own cannot be merged
            numbers[name] |= dict(zip(QUANTILES, quantiles.tolist(), strict=True))
        paths.write_whole(self.folder / "meta" / "stats.json", json.dumps(numbers))
        info = {
            "codebase_version": VERSION,
            "robot_type": self.robot,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": len(self.tasks),
            "chunks_size": FILES_IN_CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": DATA,
            "video_path": None,
            "features": self.features,
        }
        paths.write_whole(self.folder / "meta" / "info.json", json.dumps(info, indent=1))

    def _read_rows(self) -> None:
        """Read the numeric features of episodes whose files were not read yet."""
        features = {name: one for name, one in (self.features or {}).items() if one["dtype"] != "image"}
        for number in range(len(self._rows), self.episodes):
            chunk, file = divmod(number, FILES_IN_CHUNK)
            source = self.folder / DATA.format(chunk_index=chunk, file_index=file)
            table = pq.read_table(arrow_name(source), columns=list(features))
            episode = {}
            for name, feature in features.items():
                column = table[name].combine_chunks()
                while pa.types.is_fixed_size_list(column.type):
                    column = column.flatten()
                rows = column.to_numpy(zero_copy_only=False).reshape(-1, feature["shape"][-1])
                episode[name] = rows.astype(np.float32) if rows.dtype == bool else rows
            self._rows.append(episode)

    def _load_existing(self) -> None:
        """Load the state of an existing data set. Raise UserError for another program's or kind."""
        try:
            info = read_record(self.folder / "meta" / "info.json").data
            lines = [
                line
                for file in sorted((self.folder / "meta" / "episodes").glob("*/*.parquet"))
                for line in pq.read_table(arrow_name(file)).to_pylist()
            ]
            tasks = pq.read_table(arrow_name(self.folder / "meta" / "tasks.parquet")).to_pydict()
            identities = self._read_origins(len(lines))
            file_numbers = [(line["data/chunk_index"], line["data/file_index"]) for line in lines]
            same_layout = file_numbers == [divmod(i, FILES_IN_CHUNK) for i in range(len(lines))]
            same_layout = same_layout and info["codebase_version"] == VERSION and info["data_path"] == DATA
            self.features = info["features"]
            self.tasks = dict(zip(tasks["task"], tasks["task_index"], strict=True))
            existing = {"fps": info["fps"], "robot_type": info["robot_type"]}
            frames, listed = sum(line["length"] for line in lines), info["total_episodes"]
            statistics = [_statistics_in(line) for line in lines]
        except (OSError, KeyError, ValueError, TypeError, AttributeError, UserError, pa.ArrowException) as exc:
            raise UserError(
                f"{self.folder} holds a data set that this program did not write ({type(exc).__name__}: {exc}), and "
                "only those can be appended to; choose another folder"
            ) from exc
        if len(identities) < len(lines):
            raise UserError(
                f"{self.folder}: another program has appended to this data set ({len(lines)} episodes, of which "
                f"{ORIGINS} lists {len(identities)}), so it is not appended to; choose another folder"
            )
        if not same_layout:
            raise UserError(
                f"{self.folder} holds a data set in another layout than this program writes, and only those can be "
                "appended to; choose another folder"
            )
        for key, value in {"fps": self.fps, "robot_type": self.robot}.items():
            if existing[key] != value:
                raise UserError(
                    f"{self.folder}: its {key} is {existing[key]!r}, and what comes now has {value!r}; choose another "
                    "folder, or the same setting"
                )
        self.episodes = len(lines)
        self.frames = frames
        self.identities = set(identities) - {""}
        self._listed = lines[len(lines) // LISTED * LISTED :]
        for numbers_of_one in statistics:
            for name, one in numbers_of_one.items():
                self._statistics[name] = self._statistics[name] + one if name in self._statistics else one
        if self.episodes != listed:
            self._write_totals()  # the last writer was killed just before

    def _read_origins(self, episodes: int) -> list[str]:
        """Return the identities in `ORIGINS`, at most one an episode. What a killed writer left there of an episode
        that is not listed is removed. Raises OSError, KeyError, ValueError."""
        file = self.folder / ORIGINS
        written = file.read_bytes().split(b"\n")
        kept = written[: min(episodes, len(written) - 1)]  # the rest after the last newline is empty or a broken line
        self._origins_size = sum(len(line) + 1 for line in kept)
        os.truncate(file, self._origins_size)
        return [json.loads(line)["identity"] for line in kept]


def check_folder(folder: Path) -> None:
    """Raise UserError unless a data set can be started or continued in the folder."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; a data set is a folder")
    if folder.is_dir() and not (folder / "meta" / "info.json").is_file():
        others = sorted({entry.name for entry in folder.iterdir()} - OWN)
        if others:
            raise UserError(
                f"{folder} is neither a LeRobot data set nor empty (it has {', '.join(others[:3])}); "
                "choose another folder"
            )
    paths.check_folder("the data set's folder", folder)


def features_of(recording: Recording) -> dict[str, Any]:
    """Return the features for info.json: name -> dtype, shape and names of the axes."""
    features: dict[str, Any] = {}
    for camera, (height, width) in recording.sizes.items():
        features[f"observation.images.{camera}"] = {
            "dtype": "image",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
        }
    known = {"action": recording.action_names, "observation.state": recording.state_names}
    for name, array in _numeric_features(recording).items():
        names = ["step", "dimension"] if array.ndim > 2 else list(known.get(name, ())) or None
        features[name] = {"dtype": str(array.dtype), "shape": list(array.shape[1:]) or [1], "names": names}
    return features | {name: {"dtype": kind, "shape": [1], "names": None} for name, (kind, _) in INDICES.items()}


def _numeric_features(recording: Recording) -> dict[str, Array]:
    """Return the numeric features: name -> [n, ...]; scalar features are [n]."""
    features: dict[str, Array] = {}
    if recording.state.shape[1]:
        features["observation.state"] = recording.state.astype(np.float32)
    features["action"] = recording.actions.astype(np.float32)
    if recording.executed is not None:
        features["action.executed"] = recording.executed.astype(np.int64)
    if recording.interventions is not None:
        features["is_intervention"] = recording.interventions
    last = np.arange(len(recording)) == len(recording) - 1
    if recording.rewards is not None:
        features["next.reward"] = recording.rewards.astype(np.float32)
        features["next.done"] = last
    if recording.success is not None:
        features["next.success"] = last & recording.success
    return {name: array[:, 0] if array.shape[1:] == (1,) else array for name, array in features.items()}


def _build_column(array: Array) -> Any:
    if array.ndim == 1:
        return pa.array(array)
    column = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _format_feature(feature: Mapping[str, Any] | None) -> str:
    return "nothing" if feature is None else f"{feature['dtype']} {feature['shape']}"


def _tasks_table(tasks: Mapping[str, int]) -> Any:
    """Return the table of tasks, with the texts as pandas' index, which lerobot looks them up in."""
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored, "metadata": None}
        for name, kind, stored in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


def _statistics_in(line: Mapping[str, Any]) -> dict[str, FeatureStatistics]:
    parts: dict[str, dict[str, Any]] = {}
    for column, value in line.items():
        if column.startswith("stats/"):
            _, name, key = column.split("/")
            parts.setdefault(name, {})[key] = value
    return {name: FeatureStatistics.from_dict(numbers) for name, numbers in parts.items()}


def _write_table(file: Path, table: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    pq.write_table(table, arrow_name(partial))
    os.replace(partial, file)
