"""Replay of transitions for off-policy trainers, in append-only files of the run folder. Frames are kept once: a
transition has the numbers of those before and after its chunk; or features in their place, if they never change.
Records never move and choices are keyed, so a resumed run draws the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.trainers import Transitions
from vla_rl.core.types import Array, EnvInfo, Observation, SampleRecord
from vla_rl.toolkit.trainers.frame_records import FrameRecords, frame_dtype
from vla_rl.toolkit.trainers.record_log import FILE_BYTES, RecordBuffer, RecordLog


@frozen(kw_only=True, eq=False)
class TransitionBatch(SampleRecord):
    """B transitions for one update."""

    obs: Observation | Array
    """Observations [B], or their features float32 [B, D] from a buffer of features."""
    following: Observation | Array
    """Observations after the chunks, as `obs`; of any content where `bootstrap` is 0."""
    actions: Array
    """Chunks in the simulator's units, float32 [B, C, A], or the noise that led to them, [B, R, W]."""
    rewards: Array
    """Sums of the discounted rewards of each chunk, float32 [B]."""
    bootstrap: Array
    """Factor of the value that follows, float32 [B]: the discount after the chunk's actions, or 0 after an end."""

    def __len__(self) -> int:
        return len(self.rewards)


class TransitionBuffer:
    """The newest transitions of a run, up to a capacity. Files hold the buffer's transitions, those that the last two
    checkpoints need, and what shares their files."""

    def __init__(
        self,
        folder: Path,
        info: EnvInfo,
        chunk: int,
        capacity: int,
        discount: float,
        file_bytes: int = FILE_BYTES,
        features: int | None = None,
        action_shape: tuple[int, int] | None = None,
    ) -> None:
        """Create a buffer without transitions; `load` continues from those of an earlier process.

        Args:
            folder: folder for its files alone.
            chunk: actions of a chunk.
            capacity: most transitions.
            discount: discount of rewards per environment step.
            features: size D of the features that are kept instead of frames; None: frames are kept.
            action_shape: shape of what takes the place of a chunk's actions; None: [C, A].
        """
        self._discount = discount
        self._frame_records = FrameRecords(info)
        self._of_features = features is not None
        if features is None:
            self._frames = RecordLog(folder / "frames", frame_dtype(info), file_bytes)
        else:
            self._frames = RecordLog(folder / "features", np.dtype([("features", np.float32, (features,))]), file_bytes)
        dtype = _transition_dtype(chunk, action_shape or (chunk, info.action_dim))
        self._transitions = RecordBuffer(folder / "transitions", dtype, capacity, file_bytes)

    def __len__(self) -> int:
        return len(self._transitions)

    @property
    def oldest_transition(self) -> int:
        """Number of the oldest transition in the buffer."""
        return self._transitions.oldest_record

    @property
    def transition_count(self) -> int:
        """Number of transitions that were added since the run began."""
        return self._transitions.count

    def add(self, transitions: Transitions, features: Array | None = None) -> None:
        """Add transitions, and forget the oldest beyond the capacity. UserError, no change, if the disk is full.

        Args:
            features: features float32 [F, D] of the frames, for a buffer that keeps these, and for no other.
        """
        assert (features is not None) == self._of_features
        begin = self._frames.count
        records = np.zeros(len(transitions), self._transitions.dtype)
        records["oldest_frame"] = begin
        records["first"] = begin + transitions.first
        records["following"] = begin + transitions.following
        for name in ("actions", "rewards", "valid", "terminated"):
            records[name] = getattr(transitions, name)
        frames = np.zeros(len(transitions.frames), self._frames.dtype)
        if features is None:
            self._frame_records.write_frames(transitions.frames, frames)
        else:
            frames["features"] = features
        self._frames.append(frames)
        try:
            self._transitions.append(records)
        except UserError:
            self._frames.truncate(0 if begin == 0 else begin - 1, begin)
            raise
        needed = self._transitions.oldest_needed
        if needed:
            self._transitions.drop_before(needed)
            self._frames.drop_before(self._oldest_frame(needed))

    def read_transitions(self, indices: Array) -> TransitionBatch:
        """Return transitions by their numbers, `first` to `count` - 1, int64 [B]."""
        records = self._transitions.read_records(indices)
        frames, rows = np.unique(np.concatenate([records["first"], records["following"]]), return_inverse=True)
        kept = self._frames.read_records(frames)
        obs, following = (
            kept["features"][part] if self._of_features else self._frame_records.read_frames(kept[part])
            for part in np.split(rows, 2)
        )
        valid = records["valid"]
        discounts = self._discount ** np.arange(valid.shape[1])
        bootstrap = self._discount ** valid.sum(1) * ~records["terminated"]
        return TransitionBatch(
            obs=obs,
            following=following,
            actions=np.ascontiguousarray(records["actions"]),
            rewards=(records["rewards"] * discounts * valid).sum(1).astype(np.float32),
            bootstrap=bootstrap.astype(np.float32),
        )

    def state(self) -> Mapping[str, Any]:
        """Return what `load` needs in addition to the files, which are on the disk then."""
        self._frames.sync()
        self._transitions.protect_records()
        return {
            "frames": self._frames.count,
            "transitions": self._transitions.count,
            "instructions": self._frame_records.instructions,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the files as they were at `state`. Raises UserError if they are missing."""
        self._transitions.go_on(state["transitions"])
        begin = self._oldest_frame(self.oldest_transition) if len(self) else 0
        self._frames.truncate(begin, state["frames"])
        self._frame_records.instructions = state["instructions"]

    def close(self) -> None:
        """Close the files."""
        self._frames.close()
        self._transitions.close()

    def _oldest_frame(self, transition: int) -> int:
        """Return the oldest frame that this transition or a later one may need."""
        return int(self._transitions.read_records(np.array([transition]))["oldest_frame"][0])


def _transition_dtype(chunk: int, action_shape: tuple[int, int]) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("oldest_frame", np.int64),
            ("first", np.int64),
            ("following", np.int64),
            ("actions", np.float32, action_shape),
            ("rewards", np.float32, (chunk,)),
            ("valid", np.bool_, (chunk,)),
            ("terminated", np.bool_),
        ]
    )
