"""Store of labelled observations, in append-only files of the run folder, for trainers that aggregate data sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy
from vla_rl.toolkit.trainers.frame_records import FrameRecords, frame_dtype
from vla_rl.toolkit.trainers.record_log import FILE_BYTES, RecordBuffer


class LabelledChunks:
    """The newest observations of a run that were labelled with a chunk of actions, up to a capacity. Files hold these,
    those that the last two checkpoints need, and the rest of the files that they are in."""

    def __init__(self, folder: Path, info: EnvInfo, chunk: int, capacity: int, file_bytes: int = FILE_BYTES) -> None:
        """Create a store without samples; `load` continues from those of an earlier process.

        Args:
            folder: folder for its files alone.
            chunk: actions of a chunk.
            capacity: most samples.
        """
        self._frames = FrameRecords(info)
        dtype = np.dtype([("frame", frame_dtype(info)), ("actions", np.float32, (chunk, info.action_dim))])
        self._log = RecordBuffer(folder / "labels", dtype, capacity, file_bytes)

    def __len__(self) -> int:
        return len(self._log)

    @property
    def oldest_sample(self) -> int:
        """Number of the oldest sample."""
        return self._log.oldest_record

    @property
    def sample_count(self) -> int:
        """Number of samples that were added since the run began."""
        return self._log.count

    def add(self, obs: Observation, actions: Array) -> None:
        """Add observations with their chunks, float32 [B, C, A], and forget the oldest samples beyond the capacity.
        Raises UserError where the disk is full; the store is unchanged then."""
        if not len(obs):
            return
        records = np.zeros(len(obs), self._log.dtype)
        self._frames.write_frames(obs, records["frame"])
        records["actions"] = actions
        self._log.append(records)
        self._log.drop_before(self._log.oldest_needed)

    def read_labelled(self, indices: Array) -> tuple[Observation, Array]:
        """Return samples by number, `oldest_sample` to `count` - 1, int64 [B]: observations and chunks [B, C, A]."""
        records = self._log.read_records(indices)
        return self._frames.read_frames(records["frame"]), np.ascontiguousarray(records["actions"])

    def state(self) -> Mapping[str, Any]:
        """Return what `load` needs in addition to the files, which are on the disk then."""
        self._log.protect_records()
        return {"count": self.sample_count, "instructions": self._frames.instructions}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the files as they were at `state`. Raises UserError if they are missing."""
        self._log.go_on(state["count"])
        self._frames.instructions = state["instructions"]

    def close(self) -> None:
        """Close the files."""
        self._log.close()


class AggregatedDemonstrations(Demonstrations):
    """Recorded demonstrations, if any, followed by the labelled chunks of a run."""

    def __init__(self, recorded: Demonstrations | None, labelled: LabelledChunks) -> None:
        self._recorded = recorded
        self._recorded_samples = 0 if recorded is None else recorded.num_samples()
        self._labelled = labelled

    def num_samples(self) -> int:
        return self._recorded_samples + len(self._labelled)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        index = np.asarray(indices)
        is_recorded = index < self._recorded_samples
        labelled = index[~is_recorded] - self._recorded_samples + self._labelled.oldest_sample
        if self._recorded is None or not is_recorded.any():
            return self._labelled.read_labelled(labelled)
        obs, actions = self._recorded.read_samples(index[is_recorded])
        obs = obs.numpy()
        actions = np.asarray(to_numpy(actions), np.float32)
        if len(labelled):
            further, further_actions = self._labelled.read_labelled(labelled)
            obs = Observation.concat([obs, further])  # step counts, which recordings lack, are left out
            actions = np.concatenate([actions, further_actions])
        order = np.argsort(np.argsort(~is_recorded, kind="stable"))
        return obs.take(order), actions[order]
