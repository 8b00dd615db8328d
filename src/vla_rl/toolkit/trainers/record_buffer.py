"""Buffer of the newest records, up to a capacity, that checkpoints can continue from."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np

from vla_rl.toolkit.trainers.record_log import FILE_BYTES, RecordLog

PROTECTED = 2
"""Checkpoints whose records are not deleted: the last one may be damaged."""


class RecordBuffer(RecordLog):
    """Records of which the newest count. Files hold these, those that the last two checkpoints need, and the rest of
    the files that they are in.
    """

    def __init__(self, folder: Path, dtype: np.dtype[np.void], capacity: int, file_bytes: int = FILE_BYTES) -> None:
        """Open a buffer without records; `go_on` continues an earlier process's.

        Args:
            folder: folder for the files of this buffer alone.
            capacity: most records that count.
        """
        super().__init__(folder, dtype, file_bytes)
        self.capacity = capacity
        self._protected: deque[int] = deque(maxlen=PROTECTED)
        """First records of the last checkpoints."""

    def __len__(self) -> int:
        return self.count - self.oldest_record

    @property
    def oldest_record(self) -> int:
        """Number of the oldest record that counts."""
        return self._first_of(self.count)

    @property
    def oldest_needed(self) -> int:
        """Number of the oldest record that counts or that a checkpoint needs."""
        return min([self.oldest_record, *self._protected])

    def protect_records(self) -> None:
        """Keep the records that count for a checkpoint. Raises UserError where they cannot be written to the disk."""
        self.sync()
        if not self._protected or self._protected[-1] != self.oldest_record:
            self._protected.append(self.oldest_record)

    def go_on(self, count: int) -> None:
        """Continue from the checkpoint that was made at this `count`. Raises UserError if records are missing."""
        self.truncate(self._first_of(count), count)
        self._protected.clear()
        self._protected.append(self.oldest_record)

    def _first_of(self, count: int) -> int:
        return max(0, count - self.capacity)
