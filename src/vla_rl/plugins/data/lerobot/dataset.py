"""Samples of a LeRobot data set: numbers are kept in memory, images are read on demand."""

from __future__ import annotations

import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from attrs import evolve
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError

from vla_rl.core.contexts import DataContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, DataProperties, Observation, RecordedRewards
from vla_rl.plugins.data.lerobot.config import LeRobotConfig
from vla_rl.plugins.data.lerobot.episode_list import read_meta
from vla_rl.plugins.data.lerobot.frames import (
    SUCCESS,
    RecordedFrames,
    choose_episodes,
    group_rows,
    read_rows,
    refuse_first,
    select_by_labels,
)
from vla_rl.plugins.data.lerobot.meta import Meta, find_feature_size, find_folder, pixels_of
from vla_rl.plugins.data.lerobot.video import Videos, find_clip_faults
from vla_rl.toolkit.data.episodes import EpisodeFilter
from vla_rl.toolkit.data.idle_steps import choose_moving_steps
from vla_rl.toolkit.data.images import check_image, decode_image, stack_images
from vla_rl.toolkit.data.inspection.gripper import measure_gripper_signs
from vla_rl.toolkit.data.samples import (
    StepWindows,
    check_finite,
    check_fit,
    compute_relative_statistics,
    compute_statistics,
    match_cameras,
)

IMAGES = "observation.images."
INTERVENTION = "is_intervention"
STORED = {"bytes": Value("binary"), "path": Value("string")}
"""Arrow type of an image that is stored in a Parquet file."""


class LeRobotData(Demonstrations):
    """Demonstrations of a LeRobot data set."""

    def __init__(self, config: LeRobotConfig, context: DataContext) -> None:
        """Raise UserError for a folder without a complete data set, and for one that does not fit the simulator."""
        folder = find_folder(config.folder)
        where = str(folder)
        self._chunk = context.chunk
        meta = read_meta(folder)
        uses_state = context.env.state_dim > 0
        sizes = {
            name: find_feature_size(meta, where, name)
            for name in (config.action, *([config.state] if uses_state else []))
        }
        rewarded = config.reward in meta.features
        columns = sizes | ({config.reward: find_feature_size(meta, where, config.reward)} if rewarded else {})
        helped = config.only == "interventions"
        flagged = helped or (rewarded and INTERVENTION in meta.features)
        columns |= {INTERVENTION: find_feature_size(meta, where, INTERVENTION)} if flagged else {}
        self._whole = _whole_chunks(meta, where, config.action, context.chunk)
        action_dim = sizes[config.action] // (context.chunk if self._whole else 1)
        env = check_fit(where, context.env, action_dim, sizes[config.state] if uses_state else 0)
        images = [name for name, feature in meta.features.items() if feature.is_image]
        usual = {c: IMAGES + c for c in env.cameras if c not in images}
        self._cameras = match_cameras(where, env, images, {**usual, **config.cameras})
        self._pixels = {name: pixels_of(folder, name, meta.features[name]) for name in self._cameras.values()}
        self._filmed = {name for name in self._cameras.values() if meta.features[name].dtype == "video"}
        chosen = EpisodeFilter(config.episodes)
        if chosen.needs_success:
            columns |= {SUCCESS: find_feature_size(meta, where, SUCCESS)}
        episodes = choose_episodes(folder, meta, chosen, self._filmed)
        rows = read_rows(folder, meta, episodes, columns, self._filmed)
        rows = select_by_labels(where, meta, rows, chosen)
        table = rows.table
        for name in columns:
            check_finite(where, name, table[name], table["episode_index"], table["frame_index"])
        refuse_first(where, find_clip_faults(rows, meta.fps, {name: self._pixels[name] for name in self._filmed}))
        if config.drop_no_ops:
            rows = self._leave_out_no_ops(where, rows, config, uses_state)
            table = rows.table
        self._actions = table[config.action]
        self._state = table[config.state] if uses_state else None
        self._rewards = table[config.reward][:, 0] if rewarded else None
        self._reward = config.reward
        self._drops = config.drop_no_ops
        self._times = table["timestamp"].astype(np.float64)
        self._instructions = [meta.tasks[task] for task in table["task_index"].tolist()]
        self._first = rows.first
        self._last = rows.last_rows
        self._numbers = [episode.index for episode in rows.episodes]
        self._clips = [episode.clips for episode in rows.episodes]
        every = self._whole or config.ends != "drop"
        self._windows = StepWindows(rows.episode_lengths.tolist(), 1 if every else context.chunk, where)
        self._flags: Array | None = table[INTERVENTION][:, 0] > 0 if flagged else None
        """Whether the first action of a row is an intervention, bool [rows]; None: unknown, or not needed."""
        self._chosen = self._select_interventions(self._flags, where) if helped and self._flags is not None else None
        """Samples of the data set that are read, int64; None: all."""
        self._action_dim = action_dim
        self._ends = config.ends
        self._properties = DataProperties(
            fps=None if self._whole else meta.fps,  # a row of recorded chunks is a chunk
            action_names=meta.features[config.action].names,
            state_names=meta.features[config.state].names if uses_state else (),
            gripper_signs={} if self._whole or self._state is None else self._measure_gripper_signs(meta, config),
        )
        self._where = where
        self._order = rows.order
        self._videos = Videos(meta.fps, max(self._pixels.values(), default=1))
        stored = [name for name in dict.fromkeys(self._cameras.values()) if name not in self._filmed]
        self._stored = _open_stored(where, rows.files, stored) if stored else None
        if self._stored is not None:
            for name, items in self._stored[self._order[self._first].tolist()].items():
                for episode, item in zip(rows.episodes, items, strict=True):
                    self._check_stored(episode.index, name, item)

    def _measure_gripper_signs(self, meta: Meta, config: LeRobotConfig) -> dict[str, int]:
        assert self._state is not None
        bounds = zip(self._first.tolist(), self._last.tolist(), strict=True)
        episodes = [(self._actions[first : last + 1], self._state[first : last + 1]) for first, last in bounds]
        return measure_gripper_signs(episodes, *(meta.features[name].names for name in (config.action, config.state)))

    def num_samples(self) -> int:
        return len(self._windows) if self._chosen is None else len(self._chosen)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        samples = np.asarray(indices) if self._chosen is None else self._chosen[np.asarray(indices)]
        episodes, steps = self._windows.locate_samples(samples)
        rows = self._first[episodes] + steps
        stored = {} if self._stored is None else self._stored[self._order[rows].tolist()]
        images = {}
        for camera, name in self._cameras.items():
            if name in self._filmed:
                clips = [self._clips[episode][name] for episode in episodes]
                times = [clip.start + self._times[row] for clip, row in zip(clips, rows, strict=True)]
                frames = [self._videos.read_frame(clip.path, time) for clip, time in zip(clips, times, strict=True)]
            else:
                frames = [self._decode_image(name, (item or {}).get("bytes")) for item in stored[name]]
            images[camera] = stack_images(self._where, name, frames)
        observation = Observation(
            images=images,
            instructions=tuple(self._instructions[row] for row in rows),
            state=None if self._state is None else self._state[rows],
        )
        if self._whole:
            return observation, self._actions[rows].reshape(len(rows), self._chunk, self._action_dim)
        following = rows[:, None] + np.arange(self._chunk)
        return observation, self._actions[np.minimum(following, self._last[episodes][:, None])]

    def recorded_actions(self, indices: Any) -> Array | None:
        if self._whole or self._ends != "mask":
            return None
        samples = np.asarray(indices) if self._chosen is None else self._chosen[np.asarray(indices)]
        return self._windows.count_actions(samples, self._chunk)

    def read_rewards(self, indices: Any, discount: float) -> RecordedRewards:
        if self._rewards is None:
            raise UserError(
                f"{self._where} has no feature {self._reward!r} with rewards; record with the hook lerobot, or "
                f"give imitation.data.reward"
            )
        if self._chosen is not None or self._drops:
            key = "drop_no_ops" if self._drops else "only: interventions"
            raise UserError(
                f"{self._where}: `{key}` reads samples without those that follow them, and a "
                "trainer of rewards needs both; leave it out"
            )
        episodes, steps = self._windows.locate_samples(np.asarray(indices))
        rows = self._first[episodes] + steps
        stride = 1 if self._whole else self._chunk
        recorded = self._windows.sum_rewards(
            np.asarray(indices), self._rewards, rows, self._last[episodes], stride, discount
        )
        return recorded if self._flags is None else evolve(recorded, interventions=self._flags[rows])

    def _select_interventions(self, flags: Array, where: str) -> Array:
        """Return the samples whose first row is flagged (bool [rows]). Raise UserError if no sample is."""
        samples = np.arange(len(self._windows))
        episodes, steps = self._windows.locate_samples(samples)
        chosen: Array = samples[flags[self._first[episodes] + steps]]
        if not len(chosen):
            raise UserError(
                f"{where} has no sample that begins with an intervention ({INTERVENTION}), which is all that `only: "
                "interventions` reads"
            )
        return chosen

    def _leave_out_no_ops(
        self, where: str, rows: RecordedFrames, config: LeRobotConfig, uses_state: bool
    ) -> RecordedFrames:
        """Return the rows in which something moves. Raise UserError for rows of whole chunks."""
        if self._whole:
            raise UserError(
                f"{where}: its rows are whole chunks, of which no step can be left out; set drop_no_ops: false"
            )
        spans = [slice(first, last + 1) for first, last in zip(rows.first, rows.last_rows, strict=True)]
        state = rows.table[config.state] if uses_state else None
        moving = choose_moving_steps(
            where, [(rows.table[config.action][span], None if state is None else state[span]) for span in spans]
        )
        kept = np.concatenate([span.start + steps for span, steps in zip(spans, moving, strict=True)])
        table = {name: column[kept] for name, column in rows.table.items()}
        return group_rows(rows.files, table, rows.order[kept], rows.episodes)

    def data_statistics(self) -> Any:
        features = {"action": self._actions.reshape(-1, self._action_dim)} | (
            {} if self._state is None else {"state": self._state}
        )
        return compute_statistics(features)

    def relative_statistics(self, references: Sequence[int | None]) -> Any:
        assert self._state is not None  # what actions are relative to is chosen for a simulator with a state
        shape = (-1, self._chunk, self._action_dim) if self._whole else (-1, self._action_dim)
        spans = zip(self._numbers, self._first, self._last + 1, strict=True)
        episodes = {
            number: (self._actions[first:end].reshape(shape), self._state[first:end]) for number, first, end in spans
        }
        return compute_relative_statistics(self._where, episodes, references, self._chunk, self._ends)

    def data_properties(self) -> DataProperties:
        return self._properties

    def _check_stored(self, episode: int, name: str, item: Any) -> None:
        """Raise UserError for a stored image that cannot be decoded, by its header."""
        try:
            check_image((item or {}).get("bytes") or b"", self._pixels[name])
        except ValueError as exc:
            raise UserError(
                f"{self._where}: in episode {episode} an image of {name} cannot be decoded ({exc}); choose another "
                "feature in `cameras`, or download it again"
            ) from exc

    def _decode_image(self, name: str, data: bytes | None) -> Array:
        try:
            return decode_image(data or b"", self._pixels[name])
        except ValueError as exc:
            raise UserError(f"{self._where}: an image of {name} cannot be decoded ({exc}); download it again") from exc


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


def _open_stored(where: str, files: Sequence[Path], names: list[str]) -> Dataset:
    """Return the encoded images of all rows of the files, in order. `datasets` converts the files to a memory-mapped
    table once and keeps that in its cache."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # one line of a log, hundreds of columns long
    try:
        return Dataset.from_parquet(
            [glob.escape(str(file)) for file in files], columns=names, features=Features(dict.fromkeys(names, STORED))
        )
    except (DatasetGenerationError, OSError) as exc:
        raise UserError(
            f"{where}: its images cannot be converted ({exc.__cause__ or exc})\n"
            f"  they go to {datasets.config.HF_DATASETS_CACHE}, which HF_HOME moves; or download the data again"
        ) from exc
