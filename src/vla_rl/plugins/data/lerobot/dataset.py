"""Samples of a data set: numbers in memory, images read when they are asked for."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from PIL import Image

from vla_rl.core.demonstrations import Array, Windows, check_fit, match_cameras, statistics
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Context, Observation
from vla_rl.plugins.data.lerobot import LeRobotConfig
from vla_rl.plugins.data.lerobot.meta import EpisodeMeta, Meta, read_meta
from vla_rl.plugins.data.lerobot.video import Videos

IMAGES = "observation.images."
STORED = {"bytes": Value("binary"), "path": Value("string")}
"""An image within a Parquet file."""


class LeRobotData(Demonstrations):
    def __init__(self, config: LeRobotConfig, context: Context) -> None:
        """Raises UserError for a folder that is no complete data set, and for one that does not fit the simulator."""
        where, self._chunk = str(config.folder), context.chunk
        meta = read_meta(config.folder)
        uses_state = context.env is not None and context.env.state_dim > 0
        dims = [_length(meta, where, name) for name in (config.action, *([config.state] if uses_state else []))]
        env = check_fit(where, context.env, dims[0], dims[1] if uses_state else 0)
        pictures = [name for name, f in meta.features.items() if f["dtype"] in ("image", "video")]
        usual = {c: IMAGES + c for c in env.cameras if c not in pictures}
        self._cameras = match_cameras(where, env, pictures, {**usual, **config.cameras})
        self._in_video = {name: meta.features[name]["dtype"] == "video" for name in self._cameras.values()}
        self._episodes = meta.episodes[: config.episodes]
        self._videos = Videos(meta.fps)
        self._rows = _open(self._episodes, meta, [n for n, video in self._in_video.items() if not video], config)
        numbers = self._rows.select_columns([c for c in self._rows.column_names if c not in pictures])
        table = numbers.with_format("numpy")[:]
        order = np.lexsort((table["frame_index"], table["episode_index"]))
        order = order[np.isin(table["episode_index"][order], [e.index for e in self._episodes])]
        self._order, self._times = order, table["timestamp"][order].astype(np.float64)
        self._actions = np.stack(table[config.action][order]).astype(np.float32)
        self._state = np.stack(table[config.state][order]).astype(np.float32) if uses_state else None
        self._instructions = [meta.tasks[int(task)] for task in table["task_index"][order]]
        episodes, first = np.unique(table["episode_index"][order], return_index=True)
        self._first, self._meta = first, {e.index: e for e in self._episodes}
        self._numbers = episodes
        self._windows = Windows(np.diff([*first, len(order)]).tolist(), context.chunk)

    def num_samples(self) -> int:
        return len(self._windows)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        episodes, steps = self._windows.find(np.asarray(indices))
        rows = self._first[episodes] + steps
        stored = [name for name, video in self._in_video.items() if not video]
        read = self._rows.select_columns(stored)[self._order[rows].tolist()] if stored else {}
        images = {}
        for camera, name in self._cameras.items():
            if self._in_video[name]:
                clips = [self._meta[int(self._numbers[e])].clips[name] for e in episodes]
                frames = [
                    self._videos.frame(clip.path, clip.start + self._times[row])
                    for clip, row in zip(clips, rows, strict=True)
                ]
            else:
                frames = [np.asarray(Image.open(io.BytesIO(item["bytes"])).convert("RGB")) for item in read[name]]
            images[camera] = np.stack(frames)
        observation = Observation(
            images=images,
            instructions=tuple(self._instructions[row] for row in rows),
            state=None if self._state is None else self._state[rows],
        )
        return observation, np.stack([self._actions[row : row + self._chunk] for row in rows])

    def data_statistics(self) -> Any:
        features = {"action": self._actions} | ({} if self._state is None else {"state": self._state})
        return statistics(features)


def _length(meta: Meta, where: str, name: str) -> int:
    if name not in meta.features:
        raise UserError(
            f"{where} has no feature {name!r}{did_you_mean(name, meta.features)}\n  it has: {', '.join(meta.features)}"
        )
    return int(np.prod(meta.features[name]["shape"]))


def _open(episodes: tuple[EpisodeMeta, ...], meta: Meta, images: list[str], config: LeRobotConfig) -> Dataset:
    """Rows of all files, memory-mapped by `datasets`, which converts them once and keeps that in its cache."""
    vectors = [name for name in (config.action, config.state) if name in meta.features]
    features = {
        **dict.fromkeys(vectors, Sequence(Value("float32"))),
        **dict.fromkeys(images, STORED),
        **dict.fromkeys(("frame_index", "episode_index", "task_index"), Value("int64")),
        "timestamp": Value("float32"),
    }
    files = list(dict.fromkeys(str(e.data) for e in episodes))
    return Dataset.from_parquet(files, columns=list(features), features=Features(features))
