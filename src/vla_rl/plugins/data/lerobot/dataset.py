"""Samples of a LeRobot data set: numbers are kept in memory, images are read on demand."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from attrs import evolve
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError
from pyarrow.dataset import dataset as open_rows

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, Context, Observation, RecordedRewards
from vla_rl.plugins.data.lerobot import LeRobotConfig
from vla_rl.plugins.data.lerobot.folder import find_folder
from vla_rl.plugins.data.lerobot.meta import EpisodeMeta, Meta, check_files, pixels_of, read_meta
from vla_rl.plugins.data.lerobot.video import Videos
from vla_rl.toolkit.data.arrow import arrow_name
from vla_rl.toolkit.data.pictures import decode_picture, stack_pictures
from vla_rl.toolkit.data.samples import StepWindows, check_finite, check_fit, match_cameras, statistics

IMAGES = "observation.images."
INTERVENTION = "is_intervention"
STORED = {"bytes": Value("binary"), "path": Value("string")}
"""Arrow type of an image that is stored in a Parquet file."""
INDEX_COLUMNS = ("episode_index", "frame_index", "task_index", "timestamp")
"""Columns that say which episode, frame, task and time a row of the table belongs to."""


class LeRobotData(Demonstrations):
    """Demonstrations of a LeRobot data set."""

    def __init__(self, config: LeRobotConfig, context: Context) -> None:
        """Raise UserError for a folder that is no complete data set, and for one that does not fit the simulator."""
        folder = find_folder(config.folder)
        where = str(folder)
        self._chunk = context.chunk
        meta = read_meta(folder)
        uses_state = context.env is not None and context.env.state_dim > 0
        sizes = {name: _length(meta, where, name) for name in (config.action, *([config.state] if uses_state else []))}
        rewarded = config.reward in meta.features
        columns = sizes | ({config.reward: _length(meta, where, config.reward)} if rewarded else {})
        helped = config.only == "interventions"
        flagged = helped or (rewarded and INTERVENTION in meta.features)
        columns |= {INTERVENTION: _length(meta, where, INTERVENTION)} if flagged else {}
        self._whole = _whole_chunks(meta, where, config.action, context.chunk)
        action_dim = sizes[config.action] // (context.chunk if self._whole else 1)
        env = check_fit(where, context.env, action_dim, sizes[config.state] if uses_state else 0)
        pictures = [name for name, feature in meta.features.items() if feature.is_picture]
        usual = {c: IMAGES + c for c in env.cameras if c not in pictures}
        self._cameras = match_cameras(where, env, pictures, {**usual, **config.cameras})
        self._pixels = {name: pixels_of(folder, name, meta.features[name]) for name in self._cameras.values()}
        self._filmed = {name for name in self._cameras.values() if meta.features[name].dtype == "video"}
        episodes = meta.episodes[: config.episodes]
        check_files(folder, episodes, self._filmed)
        files = list(dict.fromkeys(e.data for e in episodes))
        table = _numbers(where, files, columns)
        order = np.lexsort((table["frame_index"], table["episode_index"]))
        order = order[np.isin(table["episode_index"][order], [e.index for e in episodes])]
        table = {name: column[order] for name, column in table.items()}
        _check_rows(where, table, episodes)
        for name in columns:
            check_finite(where, name, table[name], table["episode_index"], table["frame_index"])
        unknown = sorted(set(table["task_index"].tolist()) - set(meta.tasks))
        if unknown:
            raise UserError(f"{where}: rows are of tasks {unknown}, which meta/ does not name; download it again")
        self._actions = table[config.action]
        self._state = table[config.state] if uses_state else None
        self._rewards = table[config.reward][:, 0] if rewarded else None
        self._reward = config.reward
        self._times = table["timestamp"].astype(np.float64)
        self._instructions = [meta.tasks[task] for task in table["task_index"].tolist()]
        indices, first = np.unique(table["episode_index"], return_index=True)
        self._first = first
        clips = {e.index: e.clips for e in episodes}
        self._clips = [clips[index] for index in indices.tolist()]
        lengths, every = np.diff([*self._first, len(order)]), self._whole or config.ends == "repeat"
        self._windows = StepWindows(lengths.tolist(), 1 if every else context.chunk)
        self._last = self._first + lengths - 1
        self._flags: Array | None = table[INTERVENTION][:, 0] > 0 if flagged else None
        """Whether the first action of a row is an intervention, bool [rows]; None: unknown, or not needed."""
        self._chosen = self._interventions(self._flags, where) if helped and self._flags is not None else None
        """Samples of the data set that are read, int64; None: all."""
        self._action_dim = action_dim
        self._where = where
        self._order = order
        self._videos = Videos(meta.fps, max(self._pixels.values(), default=1))
        stored = [name for name in dict.fromkeys(self._cameras.values()) if name not in self._filmed]
        self._stored = _open_stored(where, files, stored) if stored else None

    def num_samples(self) -> int:
        return len(self._windows) if self._chosen is None else len(self._chosen)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        samples = np.asarray(indices) if self._chosen is None else self._chosen[np.asarray(indices)]
        episodes, steps = self._windows.find(samples)
        rows = self._first[episodes] + steps
        stored = {} if self._stored is None else self._stored[self._order[rows].tolist()]
        images = {}
        for camera, name in self._cameras.items():
            if name in self._filmed:
                clips = [self._clips[episode][name] for episode in episodes]
                times = [clip.start + self._times[row] for clip, row in zip(clips, rows, strict=True)]
                frames = [self._videos.frame(clip.path, time) for clip, time in zip(clips, times, strict=True)]
            else:
                frames = [self._decode(name, (item or {}).get("bytes")) for item in stored[name]]
            images[camera] = stack_pictures(self._where, name, frames)
        observation = Observation(
            images=images,
            instructions=tuple(self._instructions[row] for row in rows),
            state=None if self._state is None else self._state[rows],
        )
        if self._whole:
            return observation, self._actions[rows].reshape(len(rows), self._chunk, self._action_dim)
        following = rows[:, None] + np.arange(self._chunk)
        return observation, self._actions[np.minimum(following, self._last[episodes][:, None])]

    def read_rewards(self, indices: Any, discount: float) -> RecordedRewards:
        if self._rewards is None:
            raise UserError(
                f"{self._where} has no feature {self._reward!r} with rewards; record with the hook lerobot, or "
                f"give imitation.data.reward"
            )
        if self._chosen is not None:
            raise UserError(
                f"{self._where}: `only: interventions` reads samples without those that follow them, and a "
                "trainer of rewards needs both; leave it out"
            )
        episodes, steps = self._windows.find(np.asarray(indices))
        rows = self._first[episodes] + steps
        stride = 1 if self._whole else self._chunk
        recorded = self._windows.rewards(
            np.asarray(indices), self._rewards, rows, self._last[episodes], stride, discount
        )
        return recorded if self._flags is None else evolve(recorded, interventions=self._flags[rows])

    def _interventions(self, flags: Array, where: str) -> Array:
        """Return the samples whose first row is flagged (bool [rows]). Raise UserError where there are none."""
        samples = np.arange(len(self._windows))
        episodes, steps = self._windows.find(samples)
        chosen: Array = samples[flags[self._first[episodes] + steps]]
        if not len(chosen):
            raise UserError(
                f"{where} has no sample that begins with an intervention ({INTERVENTION}), which is all that `only: "
                "interventions` reads"
            )
        return chosen

    def data_statistics(self) -> Any:
        features = {"action": self._actions.reshape(-1, self._action_dim)} | (
            {} if self._state is None else {"state": self._state}
        )
        return statistics(features)

    def _decode(self, name: str, data: bytes | None) -> Array:
        try:
            return decode_picture(data or b"", self._pixels[name])
        except ValueError as exc:
            raise UserError(f"{self._where}: an image of {name} cannot be decoded ({exc}); download it again") from exc


def _length(meta: Meta, where: str, name: str) -> int:
    if name not in meta.features:
        raise UserError(
            f"{where} has no feature {name!r}{did_you_mean(name, meta.features)}\n  it has: {', '.join(meta.features)}"
        )
    return math.prod(meta.features[name].shape)


def _whole_chunks(meta: Meta, where: str, name: str, chunk: int) -> bool:
    """Return whether the action of a row is a whole chunk [C, A] instead of one action [A]. Raise UserError for a
    recorded chunk of another length."""
    shape = meta.features[name].shape
    if len(shape) < 2:
        return False
    if len(shape) > 2 or shape[0] != chunk:
        raise UserError(
            f"{where}: a row of {name!r} is {list(shape)}, recorded chunks of {shape[0]} actions, and rollout.chunk is "
            f"{chunk}; give rollout.chunk: {shape[0]}, or record `rows: steps`"
        )
    return True


def _numbers(where: str, files: Sequence[Path], sizes: dict[str, int]) -> dict[str, Array]:
    """Return the columns of all rows of the files, in order: the vectors named in `sizes` as float32 [rows, size], and
    the columns `INDEX_COLUMNS` as [rows]."""
    try:
        table = open_rows([arrow_name(file) for file in files], format="parquet").to_table(
            columns=[*sizes, *INDEX_COLUMNS]
        )
        index_columns = {name: _place(name, table[name]) for name in INDEX_COLUMNS}
        return index_columns | {name: _vectors(name, table[name], size) for name, size in sizes.items()}
    except (OSError, ValueError, LookupError, pa.ArrowException) as exc:
        raise UserError(f"{where}: its rows cannot be read ({exc}); download it again") from exc


def _place(name: str, column: Any) -> Array:
    """Return a Parquet column of `INDEX_COLUMNS` as integers or seconds [rows]. Raise ValueError for missing or
    non-finite numbers."""
    values: Array = column.to_numpy()
    kinds = "iuf" if name == "timestamp" else "iu"
    if column.null_count or values.dtype.kind not in kinds:
        raise ValueError(f"{name} is {column.type} with {column.null_count} empty rows, a number in each is expected")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} is not finite in each row")
    return values


def _check_rows(where: str, table: dict[str, Array], episodes: Sequence[EpisodeMeta]) -> None:
    """Raise UserError where an episode has other rows than meta/ lists, or where a frame between two others is missing
    or duplicated. Rows are sorted."""
    indices, counts = np.unique(table["episode_index"], return_counts=True)
    rows = dict(zip(indices.tolist(), counts.tolist(), strict=True))
    for episode in episodes:
        count = rows.get(episode.index, 0)
        if not count or episode.length not in (None, count):
            listed = "" if episode.length is None else f" {episode.length} of them"
            raise UserError(
                f"{where}: there are {count or 'no'} rows of episode {episode.index}, meta/ lists{listed or ' it'}; "
                "download it again"
            )
    jumps = (np.diff(table["episode_index"]) == 0) & (np.diff(table["frame_index"]) != 1)
    if jumps.any():
        row = int(np.flatnonzero(jumps)[0])
        frame, following = table["frame_index"][row : row + 2]
        raise UserError(
            f"{where}: in episode {table['episode_index'][row]} frame {following} follows frame {frame}; a chunk needs "
            "frames without a gap: repair the episode, or leave it out"
        )


def _vectors(name: str, column: Any, size: int) -> Array:
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


def _open_stored(where: str, files: Sequence[Path], names: list[str]) -> Dataset:
    """Return the encoded images of all rows of the files, in order. `datasets` converts the files to a memory-mapped
    table once and keeps that in its cache."""
    try:
        return Dataset.from_parquet(
            [glob.escape(str(file)) for file in files], columns=names, features=Features(dict.fromkeys(names, STORED))
        )
    except (DatasetGenerationError, OSError) as exc:
        raise UserError(
            f"{where}: its images cannot be converted ({exc.__cause__ or exc})\n"
            f"  they go to {datasets.config.HF_DATASETS_CACHE}, which HF_HOME moves; or download the data again"
        ) from exc
