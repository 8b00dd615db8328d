"""Observations as records of one size, for logs in the run folder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy

NO_STEPS = -1


def frame_dtype(info: EnvInfo) -> np.dtype[np.void]:
    """Return the dtype of an observation of this simulator."""
    images = [(f"image/{name}", np.uint8, (*size, 3)) for name, size in info.cameras.items()]
    state = [("state", np.float32, (info.state_dim,))] if info.state_dim else []
    return np.dtype([*images, *state, ("steps", np.int64), ("instruction", np.int32)])


class FrameRecords:
    """Conversion of a simulator's observations to records and back. Instructions are numbered as they come."""

    def __init__(self, info: EnvInfo) -> None:
        self._info = info
        self._instructions: dict[str, int] = {}
        """Instruction -> its number in records."""

    @property
    def instructions(self) -> list[str]:
        """Return the instructions by number, for checkpoints."""
        return list(self._instructions)

    @instructions.setter
    def instructions(self, texts: Sequence[str]) -> None:
        self._instructions = {text: number for number, text in enumerate(texts)}

    def write_frames(self, frames: Observation, records: Array) -> None:
        """Write observations to as many records, whose dtype has the fields of `frame_dtype`."""
        for name in self._info.cameras:
            records[f"image/{name}"] = to_numpy(frames.images[name])
        if self._info.state_dim:
            records["state"] = to_numpy(frames.state)
        records["steps"] = NO_STEPS if frames.steps is None else to_numpy(frames.steps)
        for row, text in enumerate(frames.instructions):
            records["instruction"][row] = self._instructions.setdefault(text, len(self._instructions))

    def read_frames(self, records: Array) -> Observation:
        """Return the observations that these records hold."""
        texts = self.instructions
        with_steps = bool((records["steps"] != NO_STEPS).all())
        return Observation(
            images={name: np.ascontiguousarray(records[f"image/{name}"]) for name in self._info.cameras},
            instructions=tuple(texts[number] for number in records["instruction"].tolist()),
            state=np.ascontiguousarray(records["state"]) if self._info.state_dim else None,
            steps=np.ascontiguousarray(records["steps"]) if with_steps else None,
        )
